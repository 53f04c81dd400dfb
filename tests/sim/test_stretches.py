"""Joined dims of which an inner one is sharded, inside of `weft.sharded_factories()`: views leave
rows where they are, and whoever looks sees boxes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import weft
from tests.harness import held, ranks
from tests.oracle import check
from weft import Layout, LayoutError, Mesh, P
from weft.core import StretchedLayout

MESH = Mesh({"x": 4})

WAYS: dict[str, tuple[dict[str, int], Any, dict[int, tuple[int, ...]]]] = {
    "even": ({"x": 4}, P(None, "x"), {}),
    "uneven": ({"x": 3}, P(None, "x"), {}),
    "ragged": ({"x": 4}, P(None, "x"), {1: (3, 0, 4, 1)}),
    "two axes": ({"x": 2, "y": 2}, P(None, ("y", "x")), {}),
    "with classes": ({"x": 3, "y": 2}, P(None, "x", "y"), {}),
}


def tokens() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 8, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64),
            torch.randn(5, dtype=torch.float64)]


def _products(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As the linears of GPT-2."""
    rows = torch.addmm(bias, x.view(-1, 6), weight)
    return (F.gelu(rows) * rows.softmax(-1)).view(2, 8, 5)


def _loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    targets = torch.zeros_like(x.select(-1, 0), dtype=torch.long)
    return F.cross_entropy((x @ weight + bias).flatten(0, 1), targets.flatten())


def _shifted(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    logits = x @ weight
    targets = F.pad((x.sum(-1).abs() * 10).long().remainder(5), (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(
        logits.view(-1, 5), targets.reshape(-1), weight=bias.square().detach(), ignore_index=-100)


def _split_otherwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x.view(16, 6) * 2).view(16, 2, 3).sum(1).view(2, 8, 3).exp()


def _in_order(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What asks where rows stand."""
    rows = x.view(-1, 6)
    return rows.cumsum(0) + rows.flip(0) + rows[torch.arange(15, -1, -1)] + rows.roll(1, 0)


def _written(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    base = x * 1
    rows = base.view(-1, 6)
    rows.mul_(2)
    rows[3:5] += 1
    rows[rows[:, 0] > 1] = 0.5
    return base


def _both(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """An operand in stretches beside one in boxes, and beside one that is whole."""
    rows = x.view(-1, 6)
    return rows + (x * 2).transpose(0, 1).reshape(16, 6) + torch.linspace(
        0, 1, 16, dtype=torch.float64)[:, None]


PROGRAMS = [_products, _loss, _shifted, _split_otherwise, _in_order, _written, _both]


def outcome(program: Callable[..., Tensor], operands: list[Any]) -> list[Any]:
    out = program(*operands)
    first = torch.autograd.grad(
        (out ** 2).sum(), operands, create_graph=True, allow_unused=True)
    squares = torch.stack([one.square().sum() for one in first if one is not None])
    second = torch.autograd.grad(squares.sum(), operands[0], allow_unused=True)
    return [out, *[one.contiguous() for one in (*first, *second) if one is not None]]


def test_layout_of_stretches() -> None:
    apart = Layout(MESH, (2, 10, 5), P(None, "x"))
    layout = StretchedLayout(apart, (2, 1))
    assert (layout.shape, layout.dims, str(layout)) == ((20, 5), ((0,), ()), "[2*10@x, 5]")
    assert [layout.local_shape(rank) for rank in range(4)] == [(6, 5), (6, 5), (6, 5), (2, 5)]
    assert [str(one) for one in layout.placements] == ["_S(0, 2)"]
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout and hash(again) == hash(layout) and again != layout.plain
    assert layout.plain == Layout(MESH, (20, 5), P("x"), sizes={0: (6, 6, 6, 2)}) != layout
    for ask in (lambda: layout.box(0), lambda: layout.cuts_of(0), lambda: layout.take([0])):
        with pytest.raises(LayoutError, match="a part of each stretch"):
            ask()


def test_plans_from_and_to_stretches() -> None:
    layout = StretchedLayout(Layout(MESH, (2, 8, 5), P(None, "x")), (2, 1))
    whole = Layout(MESH, (16, 5), P())
    gather, cut = weft.plan(layout, whole), weft.plan(whole, layout)
    assert gather.bytes_received(1) == 12 * 5 * 4 == gather.lower_bound // 4
    assert cut.total_bytes == 0
    with pytest.raises(LayoutError, match="shard a dim of stretches in two ways"):
        weft.plan(layout, Layout(MESH, (16, 5), P("x")))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__[1:])
@pytest.mark.parametrize("way", WAYS)
def test_as_one_process(program: Callable[..., Tensor], way: str) -> None:
    """Results and gradients, shard by shard, to second order."""
    axes, spec, sizes = WAYS[way]

    def on_rank(mesh: Any) -> list[Any]:
        x, *others = tokens()
        layout = Layout(mesh.abstract, x.shape, spec, sizes=sizes)
        operands = [
            weft.distribute_tensor(x, mesh, layout, src_data_rank=None),
            *[weft.distribute_tensor(one, mesh, P(), src_data_rank=None) for one in others]]
        with weft.sharded_factories():
            found = outcome(program, [one.requires_grad_() for one in operands])
        return [held(one.detach()) for one in found]

    got = weft.testing.run(on_rank, mesh=axes)
    for place, due in enumerate(outcome(program, [one.requires_grad_() for one in tokens()])):
        most = max(due.detach().abs().max().item(), 1.0)
        check(due.detach(), [mine[place] for mine in got], f"{way} {place}", 1e-12 * most)


@pytest.mark.parametrize("program", [_products, _loss, _split_otherwise],
                         ids=lambda one: one.__name__[1:])
def test_rows_stay(program: Callable[..., Tensor]) -> None:
    """Nothing but sums is sent; outside, rows change ranks."""
    def moved(mesh: Any, inside: bool) -> int:
        x, *others = tokens()
        x = weft.distribute_tensor(x, mesh, P(None, "x"), src_data_rank=None).requires_grad_()
        with weft.explain() as log:
            if inside:
                with weft.sharded_factories():
                    out = program(x, *others)
            else:
                out = program(x, *others)
            out.sum().backward()
        return sum(event.nbytes for event in log.events if event.collective != "AllReduce")

    for inside, outside in weft.testing.run(
        lambda mesh: (moved(mesh, True), moved(mesh, False)), mesh={"x": 4}
    ):
        assert inside == 0 < outside


def test_shifted_targets_move_to_the_logits() -> None:
    def on_rank(mesh: Any) -> list[tuple[str, int]]:
        x, *others = tokens()
        x = weft.distribute_tensor(x, mesh, P(None, "x"), src_data_rank=None).requires_grad_()
        with weft.sharded_factories(), weft.explain() as log:
            _shifted(x, *others).backward()
        return [(event.collective, event.nbytes) for event in log.events
                if event.collective != "AllReduce"]

    for sent in weft.testing.run(on_rank, mesh={"x": 4}):
        assert sum(nbytes for _, nbytes in sent) <= 2 * 8, sent  # a target of each sample


@ranks(x=4)
def test_boxes_are_what_is_seen(mesh: Any) -> None:
    """The layout is known, and the text printed, without a collective."""
    x = weft.distribute_tensor(tokens()[0], mesh, P(None, "x"), src_data_rank=None)
    with weft.sharded_factories():
        rows = x.view(-1, 6)
    due = tokens()[0].view(-1, 6)
    with weft.explain() as log:
        if mesh.rank == 1:
            assert str(rows.sharding) == "[16@x, 6]" and rows.placements == (weft.Shard(0),)
            assert "f64[2*8@x, 6]" in repr(rows) and "a part of each stretch, [4, 6]" in repr(rows)
    assert not log.events
    (start, stop), _ = rows.sharding.box(mesh.rank)
    assert torch.equal(rows.to_local(), due[start:stop])
    assert torch.equal(rows.full_tensor(), due)
    assert torch.equal(rows.redistribute(P(None, "x")).full_tensor(), due)
    assert rows.tolist() == due.tolist()
    assert torch.equal(pickle.loads(pickle.dumps(rows)).full_tensor(), due)


@ranks(x=4)
def test_arguments_by_name(mesh: Any) -> None:
    x = weft.distribute_tensor(tokens()[0], mesh, P(None, "x"), src_data_rank=None)
    with weft.sharded_factories():
        found = [torch.reshape(input=x, shape=(16, 6)), torch.flatten(input=x, end_dim=1),
                 x.flatten(start_dim=0, end_dim=1)]
    for one in found:
        assert torch.equal(one.full_tensor(), tokens()[0].view(16, 6))


@ranks(x=4)
def test_gradients_of_views_in_stretches(mesh: Any) -> None:
    """Hooks, kept gradients, and a gradient that is given, in any layout."""
    x = weft.distribute_tensor(tokens()[0], mesh, P(None, "x"), src_data_rank=None)
    seen: list[Any] = []
    with weft.sharded_factories():
        x.requires_grad_()
        rows = x.view(-1, 6)
        rows.register_hook(lambda grad: seen.append(grad))
        rows.retain_grad()
        out = rows * 3
    given = weft.distribute_tensor(torch.ones(16, 6, dtype=torch.float64), mesh, P("x"))
    out.backward(given)
    whole = torch.full((16, 6), 3.0, dtype=torch.float64)
    assert torch.equal(seen[0].full_tensor(), whole) and torch.equal(rows.grad.full_tensor(), whole)
    assert torch.equal(x.grad.full_tensor(), whole.view(2, 8, 6))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_recomputed_as_computed(reentrant: bool, inside: bool) -> None:
    """Also where the backward is called after the context."""
    def on_rank(mesh: Any) -> tuple[Tensor, int]:
        x, weight, bias = tokens()
        x = weft.distribute_tensor(x, mesh, P(None, "x"), src_data_rank=None).requires_grad_()
        with weft.explain() as log, ExitStack() as stack:
            stack.enter_context(weft.sharded_factories())
            out = checkpoint(_products, x, weight, bias, use_reentrant=reentrant)
            loss = out.square().sum()
            if not inside:
                stack.close()
            loss.backward()
        moved = [event.nbytes for event in log.events if event.collective != "AllReduce"]
        return x.grad.full_tensor(), sum(moved)

    x, weight, bias = tokens()
    _products(x.requires_grad_(), weight, bias).square().sum().backward()
    assert x.grad is not None
    for gradient, moved in weft.testing.run(on_rank, mesh={"x": 4}):
        torch.testing.assert_close(gradient, x.grad)
        assert moved == 0


@ranks(x=4)
def test_a_shape_in_place_is_refused(mesh: Any) -> None:
    x = weft.distribute_tensor(tokens()[0], mesh, P(None, "x"), src_data_rank=None)
    with weft.sharded_factories():
        rows = x.view(-1, 6)
    with pytest.raises(weft.UnsupportedOpError, match="in place, a shape changes"):
        rows.unsqueeze_(0)
    assert torch.equal(rows.full_tensor(), tokens()[0].view(-1, 6))


@ranks(x=4)
def test_rows_move_once_for_each_graph(mesh: Any) -> None:
    """A leaf in stretches serves one step after another; its rows move once in each."""
    x = weft.distribute_tensor(tokens()[0], mesh, P(None, "x"), src_data_rank=None)
    with weft.sharded_factories():
        rows = x.view(-1, 6)
        rows.requires_grad_()
        for step in (1, 2, 3):
            with weft.explain() as log:
                (rows.cumsum(0) + rows.flip(0)).square().sum().backward()
            moves = [event for event in log.events if event.op == "aten.view.default"]
            assert [event.direction for event in moves] == ["forward", "backward"]
            assert rows.grad is not None and rows.is_leaf
            if step == 1:
                once = rows.grad.full_tensor()
            torch.testing.assert_close(rows.grad.full_tensor(), once * step)
    leaf = tokens()[0].view(-1, 6).requires_grad_()
    (leaf.cumsum(0) + leaf.flip(0)).square().sum().backward()
    torch.testing.assert_close(once, leaf.grad)
