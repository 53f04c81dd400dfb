"""Programs whose tensors move from mesh to mesh, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.oracle import block
from tests.sim.test_transport_across import MESHES, NUM_RANKS, WORLD
from weft import Layout, LayoutError, MeshError, P, Replicate, Shard, ShardTensor
from weft.core import Mesh
from weft.transport.in_flight import InFlight

X = torch.linspace(-1, 1, 35, dtype=torch.float64).view(7, 5)
W1, W2 = (torch.linspace(-2, 1, n, dtype=torch.float64) for n in (15, 6))
W1, W2 = W1.view(5, 3), W2.view(3, 2)


def on_ranks(fn: Any) -> list[Any]:
    return weft.testing.run(fn, NUM_RANKS, WORLD)


def rows(mesh: Any) -> P:
    return P(mesh.axis_names[0])


def everywhere(mesh: Any, tensor: Tensor, spec: P, grad: bool = True) -> ShardTensor:
    made = weft.distribute_tensor(tensor, mesh, spec, src_data_rank=None)
    return made.requires_grad_(grad)


def pieces_of(mesh: Any, x: Any) -> Any:
    """The local tensor and layout, of ranks inside."""
    if mesh.here is None:
        assert x.to_local().shape == (0,)
        return None
    return x.to_local().detach().clone(), x.sharding


def check_blocks(dense: Tensor, mesh: Mesh, ranks: list[Any], what: str) -> None:
    for position in range(mesh.size()):
        local, layout = ranks[mesh.rank_at(position)]
        due = block(layout, dense, mesh.coordinate(position))
        torch.testing.assert_close(local, due, msg=lambda text: f"{what}: {text}")


def model(move: Any, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Two layers; what is between them comes to another mesh, and a residual as well."""
    hidden = torch.tanh(x @ w1)
    moved = move(hidden)
    out = F.softmax(moved @ w2, dim=-1)
    return (out * out).mean() + moved.square().sum() / 8


def two_stages(_: Any, meshes: str, async_op: bool) -> dict[str, Any]:
    """The gradients and the loss, as one rank has them."""
    here, there = (weft.init_mesh(mesh) for mesh in MESHES[meshes])
    x, w1 = everywhere(here, X, rows(here)), everywhere(here, W1, P())
    w2 = everywhere(there, W2, P(None, there.axis_names[-1]))
    loss = model(lambda y: y.redistribute(there, rows(there), async_op=async_op), x, w1, w2)
    assert loss.device_mesh is there and loss.shape == ()  # type: ignore[attr-defined]
    loss.backward()
    return {
        "x": pieces_of(here, x.grad), "w1": pieces_of(here, w1.grad),
        "w2": pieces_of(there, w2.grad),
        "loss": None if there.here is None else loss.item(),
    }


def check_two_stages(meshes: str, ranks: list[dict[str, Any]]) -> None:
    one, other = MESHES[meshes]
    dense = [one.clone().requires_grad_() for one in (X, W1, W2)]
    loss = model(lambda y: y, *dense)
    loss.backward()
    for name, mesh, leaf in (("x", one, dense[0]), ("w1", one, dense[1]), ("w2", other, dense[2])):
        assert leaf.grad is not None
        check_blocks(leaf.grad, mesh, [rank[name] for rank in ranks], name)
    for position in range(other.size()):
        assert ranks[other.rank_at(position)]["loss"] == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("meshes", MESHES)
def test_two_stages(meshes: str, async_op: bool) -> None:
    check_two_stages(meshes, on_ranks(lambda world: two_stages(world, meshes, async_op)))


@pytest.mark.parametrize("meshes", MESHES)
def test_there_and_back_twice_differentiated(meshes: str) -> None:
    one, other = MESHES[meshes]

    def program(there: Any, back: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = there(x * x)
        z = back(y.exp() * y) + x  # in a mesh where x was all along
        (first,) = torch.autograd.grad((z * z).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), x)
        return first.detach(), second

    def on_rank(_: Any) -> Any:
        here, there = weft.init_mesh(one), weft.init_mesh(other)
        x = everywhere(here, X, rows(here))
        found = program(
            lambda t: t.redistribute(there, [Replicate()] * (there.ndim - 1) + [Shard(1)]),
            lambda t: t.redistribute(here, P(None, here.axis_names[0])), x,
        )
        return [pieces_of(here, grad) for grad in found]

    ranks = on_ranks(on_rank)
    due = program(lambda t: t, lambda t: t, X.clone().requires_grad_())
    for order, dense in enumerate(due):
        check_blocks(dense, one, [rank[order] for rank in ranks], f"gradient {order + 1}")


def test_branches_that_only_some_meshes_compute() -> None:
    """The backward of every rank comes to the transfers in one order, whatever it computes."""
    a, b, c = Mesh({"a": 2}, (0, 1)), Mesh({"b": 2}, (1, 2)), Mesh({"c": 2}, (3, 2))

    def program(to: dict[str, Any], x: Tensor, w: Tensor) -> Tensor:
        y = to["b"](torch.tanh(x))
        z = to["c"](x.exp())
        u = to["c"](y * y) + z
        v = to["b"](z @ w) * y.sum(1, keepdim=True)
        unused = to["a"](u)
        assert unused is not None
        return (to["c"](v) * u[:, :2]).sum() + to["c"](y.mean())

    def on_rank(_: Any) -> Any:
        bound = {name: weft.init_mesh(mesh) for name, mesh in zip("abc", (a, b, c))}
        x = everywhere(bound["a"], X, P("a"))
        w = everywhere(bound["c"], torch.cat([W1, W1], 1)[:, :2], P("c"))
        to = {
            name: lambda t, name=name, mesh=mesh: t.redistribute(mesh, P(name if t.dim() else None))
            for name, mesh in bound.items()
        }
        program(to, x, w).backward()
        return pieces_of(bound["a"], x.grad), pieces_of(bound["c"], w.grad)

    ranks = on_ranks(on_rank)
    x, w = X.clone().requires_grad_(), torch.cat([W1, W1], 1)[:, :2].clone().requires_grad_()
    program(dict.fromkeys("abc", lambda t: t), x, w).backward()
    assert x.grad is not None and w.grad is not None
    check_blocks(x.grad, a, [rank[0] for rank in ranks], "x")
    check_blocks(w.grad, c, [rank[1] for rank in ranks], "w")


def test_writes_between_the_moves() -> None:
    one, other = MESHES["overlapping"]

    def program(to: Any, x: Tensor) -> Tensor:
        y = to(x * 2)
        z = torch.zeros_like(y) if not isinstance(y, ShardTensor) else (y * 0).detach()
        z += y
        z[1:3].mul_(3)
        z[:, 0] = y[:, 1]
        return (z * z).sum()

    def on_rank(_: Any) -> Any:
        here, there = weft.init_mesh(one), weft.init_mesh(other)
        x = everywhere(here, X, P(None, "a"))
        program(lambda t: t.redistribute(there, P("b")), x).backward()
        return pieces_of(here, x.grad)

    ranks = on_ranks(on_rank)
    x = X.clone().requires_grad_()
    program(lambda t: t, x).backward()
    assert x.grad is not None
    check_blocks(x.grad, one, ranks, "x")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool, torch.uint16,
                                   torch.float8_e4m3fn], ids=str)
def test_dtypes_and_strides(dtype: torch.dtype) -> None:
    one, other = MESHES["overlapping"]
    full = (torch.arange(35).view(7, 5) % 3).to(dtype)

    def on_rank(_: Any) -> Any:
        here, there = weft.init_mesh(one), weft.init_mesh(other)
        layout = Layout(here, (7, 5), P("a"), sizes={0: (1, 0, 6)})
        local = full.new_empty(0)
        if here.here is not None:
            local = block(layout, full.view(torch.uint8).view(7, 5, -1), here.here)
            local = local.contiguous().view(dtype).squeeze(-1).t().contiguous().t()
        x = ShardTensor.from_local(local, here, layout)
        y = x.redistribute(there, [Shard(1)], async_op=True)
        assert (type(y._local) is InFlight) == (here.here is not None or there.here is not None)
        return None if there.here is None else y.full_tensor().view(torch.uint8)

    for rank, got in enumerate(on_ranks(on_rank)):
        if other.position_of_rank(rank) is not None:
            assert torch.equal(got, full.view(torch.uint8)), rank


def test_facts_are_known_on_every_rank() -> None:
    one, other = MESHES["disjoint"]

    def on_rank(_: Any) -> Any:
        here, there = weft.init_mesh(one), weft.init_mesh(other)
        x = everywhere(here, X, P("a")).t()
        y = (x + 1).redistribute(there, P(None, "a"))
        assert y.device_mesh is there and y.requires_grad and y.grad_fn is not None
        with pytest.raises(MeshError):
            _ = x + y
        if there.here is None:
            with pytest.raises(MeshError):
                y.full_tensor()
        with pytest.raises(LayoutError):
            y.redistribute(here, P(partial={"a": "avg"}))
        z = y.redistribute(here.abstract)  # a mesh's value; replicated
        return str(y.sharding), y.stride(), str(z.sharding), (y * 2).sum(0).sharding.text()

    assert on_ranks(on_rank) == [("[5, 7@a]", (1, 5), "[5, 7]", "[7@a]")] * NUM_RANKS


def test_the_log_names_both_meshes() -> None:
    one, other = MESHES["disjoint"]

    def on_rank(_: Any) -> Any:
        here, there = weft.init_mesh(one), weft.init_mesh(other)
        x = everywhere(here, X, P("a"))
        with weft.explain() as log:
            x.redistribute(there, P("a")).sum().backward()
        return [(event.op, event.transition, event.collective, event.nbytes, event.direction)
                for event in log.events if event.collective == "Transfer"]

    ranks = on_ranks(on_rank)
    there, back = "Mesh(a=2) -> Mesh(a=2)", "Mesh(a=2) -> Mesh(a=2)"
    for rank, (forward, backward) in enumerate([(0, 160), (0, 120), (160, 0), (120, 0)]):
        assert ranks[rank] == [
            ("redistribute", there, "Transfer", forward, "forward"),
            ("redistribute", back, "Transfer", backward, "backward"),
        ]
    assert ranks[4] == []


def test_from_local_outside_has_to_be_told_the_shape() -> None:
    one, _ = MESHES["disjoint"]

    def on_rank(_: Any) -> Any:
        here = weft.init_mesh(one)
        told = ShardTensor.from_local(torch.ones(2, 5), here, P("a"), shape=(4, 5))
        if here.here is not None:
            return str(told.sharding), tuple(told.to_local().shape)
        with pytest.raises(LayoutError) as caught:
            ShardTensor.from_local(torch.ones(2, 5), here, P("a"))
        assert str(caught.value).splitlines()[1:] == [
            "  Rule: a rank outside the mesh exchanges nothing, so it has to give the global "
            "shape.",
            "  Offenders: shape=None",
            "  Fix: from_local(x, mesh, [Shard(0)], shape=(8, 4)), or a Layout",
        ]
        return str(told.sharding), tuple(told.to_local().shape)

    assert on_ranks(on_rank) == [("[4@a, 5]", (2, 5))] * 2 + [("[4@a, 5]", (0,))] * 3
