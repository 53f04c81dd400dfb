"""`redistribute(async_op=True)`: what it gives, when it waits, and what it refuses."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from tests.transitions import layouts
from weft import Layout, P, ShardTensor
from weft.comm import run_simulated
from weft.core import Mesh
from weft.transport.in_flight import InFlight

X = torch.arange(15.0, dtype=torch.float64).view(5, 3)
MESH = Mesh({"a": 2, "b": 2})


def is_in_flight(x: ShardTensor) -> bool:
    return type(x._local) is InFlight


def on_four(fn: Any) -> list[Any]:
    return weft.testing.run(fn, mesh={"a": 2, "b": 2})


def test_every_pair_equals_the_synchronous_one() -> None:
    """Values, first and second gradients; what needs no communication is there at once."""
    pairs = list(itertools.product(layouts(MESH, (5, 3), ("sum",))[::3], repeat=2))[::5]

    def on_rank(bound: Any) -> None:
        for src, dst in pairs:
            seen = []
            for async_op in (False, True):
                local = torch.full(src.local_shape_at(bound.here), 2.0 + bound.rank)
                x = ShardTensor.from_local(local, bound, src).requires_grad_()
                y = x.redistribute(placements=dst, async_op=async_op)
                waits = is_in_flight(y)
                assert waits == (async_op and weft.plan(src, dst).total_bytes > 0) or src == dst
                assert y.sharding == dst and y.requires_grad and y.grad_fn is not None
                assert is_in_flight(y) == waits  # so far nothing needed its data
                weight = torch.ones_like(y).detach().requires_grad_()
                assert not is_in_flight(y)
                (first,) = torch.autograd.grad((y * y * weight).sum(), x, create_graph=True)
                (second,) = torch.autograd.grad(first.sum(), weight)
                seen.append((y.to_local(), first.to_local(), second.to_local()))
            for one, other in zip(*seen):
                assert type(one) is type(other) is torch.Tensor
                assert one.stride() == other.stride() and torch.equal(one, other), f"{src} {dst}"

    run_simulated(on_rank, 4, MESH)


USES: dict[str, Any] = {
    "add": lambda y: y + 1,
    "add to": lambda y: torch.ones(5, 3, dtype=X.dtype) + y,
    "method": lambda y: y.exp(),
    "function": lambda y: F.relu(y),
    "list": lambda y: torch.cat([y, y]),
    "keyword": lambda y: torch.add(input=y, other=y),
    "foreach": lambda y: torch._foreach_add([y, y], 1),
    "in place": lambda y: y.mul_(2),
    "local": lambda y: y.to_local(),
    "full": lambda y: y.full_tensor(),
    "item": lambda y: y.sum().item(),
    "repr": repr,
    "again": lambda y: y.redistribute(placements=P("b")),
    "again, asynchronously": lambda y: y.redistribute(placements=P("b"), async_op=True),
    "deepcopy": copy.deepcopy,
    "detach": lambda y: y.detach(),
    "data": lambda y: y.data,
    "set data": lambda y: setattr(weft.zeros(5, 3, mesh=y.device_mesh, dtype=X.dtype), "data", y),
    "copy_": lambda y: weft.zeros(5, 3, mesh=y.device_mesh, dtype=X.dtype).copy_(y),
    "numpy": lambda y: y.numpy(),
    "view": lambda y: y.view(15),
    "index": lambda y: y[0],
}


@pytest.mark.parametrize("use", USES)
def test_every_use_waits(use: str) -> None:
    def on_rank(bound: Any) -> None:
        x = weft.distribute_tensor(X, bound, P("a"))
        outs = []
        for async_op in (False, True):
            y = x.redistribute(placements=P(None, "b"), async_op=async_op)
            assert is_in_flight(y) == async_op
            assert (y.shape, y.dtype, y.device.type, y.dim()) == ((5, 3), X.dtype, "cpu", 2)
            assert y.sharding == Layout(bound, (5, 3), P(None, "b"))
            assert not y.requires_grad and y.is_leaf
            outs.append(USES[use](y))
            assert not is_in_flight(y) and type(y._local) is torch.Tensor
            assert torch.equal(y.full_tensor(), 2 * X if use == "in place" else X)
        if isinstance(outs[0], torch.Tensor):
            one, other = (weft.ShardTensor.full_tensor(out) if type(out) is ShardTensor else out
                          for out in outs)
            assert torch.equal(one, other)
        elif use in ("repr", "item"):
            assert outs[0] == outs[1]

    on_four(on_rank)


def test_gradients_reach_the_source() -> None:
    def on_rank(bound: Any) -> bool:
        x = weft.distribute_tensor(X, bound, P("a")).requires_grad_()
        y = (x * x).redistribute(placements=P(), async_op=True)
        z = x.redistribute(placements=P("b"), async_op=True)
        ((y + z) * 3).sum().backward()
        return torch.equal(x.grad.full_tensor(), 3 * (2 * X + 1))

    assert on_four(on_rank) == [True] * 4


def test_backward_may_come_before_any_use() -> None:
    """Of a result that only a node of the graph has seen."""
    def on_rank(bound: Any) -> bool:
        x = weft.distribute_tensor(X, bound, P("a")).requires_grad_()
        y = x.redistribute(placements=P(), async_op=True)
        torch.autograd.backward([y], [torch.ones_like(X)])
        return torch.equal(x.grad.full_tensor(), torch.ones_like(X))

    assert on_four(on_rank) == [True] * 4


def test_results_that_only_some_ranks_use() -> None:
    """Nodes of the graph are made when the call is: all ranks' backward issues the same."""
    def on_rank(bound: Any) -> tuple[bool, float]:
        x = weft.distribute_tensor(X, bound, P("a")).requires_grad_()
        unused = x.redistribute(placements=P(None, "b"), async_op=True)
        y = x.redistribute(placements=P(), async_op=True)
        z = x.redistribute(placements=P("b"), async_op=True)
        seen = z.to_local().sum().item() if bound.rank == 1 else 0.0
        seen += y.to_local().sum().item() if bound.rank == 2 else 0.0
        (y * y + z).sum().backward()
        assert is_in_flight(unused)
        return torch.equal(x.grad.full_tensor(), 2 * X + 1), seen

    assert [ok for ok, _ in on_four(on_rank)] == [True] * 4


SOURCES = {"reduced": (P(partial={"a": "sum"}), P()),
           "scattered, then moved": (P(partial={"a": "sum"}), P("b", "a")),
           "gathered": (P("a"), P()), "moved": (P("a", "b"), P("b", "a"))}


@pytest.mark.parametrize("pair", SOURCES)
def test_a_source_that_is_written_to_is_refused(pair: str) -> None:
    src, dst = SOURCES[pair]

    def on_rank(bound: Any) -> list[str]:
        x = weft.distribute_tensor(X, bound, src)
        y = x.redistribute(placements=dst, async_op=True)
        x.add_(1)
        with pytest.raises(weft.UnsupportedOpError) as caught:
            y.sum()
        with pytest.raises(weft.UnsupportedOpError):  # and again
            y.sum()
        return str(caught.value).splitlines()

    said = on_four(on_rank)
    assert said[0][1:] == [
        "  Rule: the source is still being sent: it must not change until the first use of the "
        "result.",
        f"  Offenders: {said[0][2].removeprefix('  Offenders: ')}",
        "  Fix: x.clone().redistribute(..., async_op=True), or use the result first",
    ]


def test_what_needs_no_communication_shares_memory_until_a_write() -> None:
    def on_rank(bound: Any) -> None:
        x = weft.distribute_tensor(X, bound, P())
        y = x.redistribute(placements=P("a"), async_op=True)
        assert not is_in_flight(y)
        x.add_(1)
        assert torch.equal(y.full_tensor(), X)

    on_four(on_rank)


def test_in_inference_mode() -> None:
    def on_rank(bound: Any) -> bool:
        with torch.inference_mode():
            x = weft.distribute_tensor(X, bound, P("a"))
            y = x.redistribute(placements=P(), async_op=True)
            x.add_(1)  # torch does not count it: the source was copied
            return torch.equal(y.full_tensor(), X)

    assert on_four(on_rank) == [True] * 4


def test_the_log_has_it() -> None:
    def on_rank(bound: Any) -> list[tuple[str, str, int]]:
        x = weft.distribute_tensor(X, bound, P("a"))
        with weft.explain() as log:
            x.redistribute(placements=P(), async_op=True)
        return [(event.op, event.collective, event.nbytes) for event in log.events]

    assert on_four(on_rank) == [[("redistribute", "AllGather", nbytes)] for nbytes in (48, 48, 72,
                                                                                       72)]


def test_of_products_it_is_synchronous() -> None:
    """Their gradient is more than one node."""
    def on_rank(bound: Any) -> bool:
        layout = Layout(bound, (5, 3), P(partial={"a": "product"}))
        term = (X + 1 + bound.here[0]).requires_grad_()
        x = ShardTensor.from_local(term, bound, layout)
        y = x.redistribute(placements=P(), async_op=True)
        assert not is_in_flight(y)
        y.sum().backward()
        return torch.equal(term.grad, X + 2 - bound.here[0])

    assert on_four(on_rank) == [True] * 4
