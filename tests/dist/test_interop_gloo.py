"""DTensors and ShardTensors in one program: values, gradients, redistributes of both libraries."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import weft
from tests import migration
from tests.gloo import GlooWorld
from weft import Mesh, MeshError, P, ShardTensor

MESH = {"dp": 2, "tp": 2}
SHARD, REPLICATE = theirs.Shard, theirs.Replicate()
USES = (SHARD(0), SHARD(1), REPLICATE)
SPECS = [
    P("dp", "tp"), P("tp", "dp"), P(("dp", "tp")), P(None, ("dp", "tp")), P(), P("tp"),
    P("dp", partial={"tp": "sum"}), P(None, "tp", partial={"dp": "avg"}),
    P(partial={"dp": "max"}), P(partial={"tp": "min"}), P("dp", partial={"tp": "product"}),
]


def full_of(*shape: int) -> Tensor:
    count = float(torch.Size(shape).numel())
    return (torch.arange(count, dtype=torch.float64) * 7 % 11).view(shape) / 4


def both_ways(mesh: Any, spec: P, shape: tuple[int, ...]) -> Any:
    """The whole of a tensor of different terms per rank, as either library reads it."""
    layout = weft.Layout(mesh, shape, spec)
    local = full_of(*layout.local_shape(mesh.rank)) + mesh.rank
    if not layout.is_partial:
        local = full_of(*shape)[tuple(slice(*each) for each in layout.box(mesh.rank))].clone()
    x = ShardTensor.from_local(local, mesh, layout)
    d = weft.to_dtensor(x)
    back = weft.from_dtensor(d)
    assert back.sharding == layout and back.to_local().data_ptr() == local.data_ptr()
    return x.full_tensor(), d.full_tensor(), back.full_tensor()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_both_read_the_same_tensor(gloo: GlooWorld, spec: P) -> None:
    for ours, read, back in gloo.run(both_ways, MESH, spec, (7, 5)):
        assert torch.equal(ours, read) and torch.equal(ours, back)
        assert torch.equal(ours, full_of(7, 5)) or spec.partial


def right_to_left(mesh: Any) -> Any:
    """Two axes on one dim against the order of axes, as FSDP on top of tensor parallelism."""
    x = weft.distribute_tensor(full_of(8, 3), mesh, P(("tp", "dp")))
    d = x.to_dtensor()
    return [str(one) for one in d.placements], d.full_tensor(), d.redistribute(
        placements=[REPLICATE, SHARD(0)]).to_local(), x.redistribute(placements=P("tp")).to_local()


def test_another_order_of_axes(gloo: GlooWorld) -> None:
    for placements, whole, theirs_local, ours_local in gloo.run(right_to_left, MESH):
        assert placements == ["_S(0, 2)", "S(0)"]
        assert torch.equal(whole, full_of(8, 3))
        assert torch.equal(theirs_local, ours_local)


def redistributed(mesh: Any, shape: tuple[int, int]) -> Any:
    """Every pair of placements of two axes, by DTensor and by weft."""
    torchs = mesh.device_mesh
    found = []
    for before in product(USES, repeat=2):
        d = theirs.distribute_tensor(full_of(*shape), torchs, before, src_data_rank=None)
        x = weft.from_dtensor(d)
        for after in product(USES, repeat=2):
            asked = d.redistribute(placements=after)
            ours = x.redistribute(placements=after)
            assert weft.from_dtensor(asked).sharding == ours.sharding
            found.append((
                f"{before} -> {after}", torch.equal(asked.to_local(), ours.to_local()),
                torch.equal(ours.full_tensor(), full_of(*shape)),
            ))
    return found


@pytest.mark.parametrize("shape", [(8, 4), (6, 5)], ids=str)
def test_redistributes_against_dtensors_own(gloo: GlooWorld, shape: tuple[int, int]) -> None:
    for found in gloo.run(redistributed, MESH, shape):
        assert len(found) == 81
        assert [name for name, _, right in found if not right] == []
        assert [name for name, same, _ in found if not same] == []


def terms_reduced(mesh: Any, kind: str) -> Any:
    """Terms of DTensor's to every placement, by both."""
    local = full_of(5, 6) % 3 + mesh.rank
    d = DTensor.from_local(local, mesh.device_mesh, [theirs.Partial(kind), SHARD(1)],
                           shape=torch.Size((5, 12)), stride=(12, 1))
    x = weft.from_dtensor(d)
    waits = d.redistribute(placements=(REPLICATE, SHARD(1)), async_op=True)
    assert torch.equal(weft.from_dtensor(waits).to_local(), waits.redistribute(
        placements=(REPLICATE, SHARD(1))).to_local())
    return [
        (d.redistribute(placements=to).to_local(), x.redistribute(placements=to).to_local())
        for to in ((REPLICATE, SHARD(1)), (REPLICATE, REPLICATE), (SHARD(0), SHARD(1)))
    ]


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
def test_terms_of_every_kind(gloo: GlooWorld, kind: str) -> None:
    for found in gloo.run(terms_reduced, MESH, kind):
        for by_dtensor, by_weft in found:
            torch.testing.assert_close(by_weft, by_dtensor, rtol=1e-14, atol=0)


X, W, B = full_of(7, 6), full_of(4, 6) - 1, full_of(4) - 2


def mixed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = F.linear(x, w, b).relu()
    h = torch.cat([h, h * b], 1) + h.sum(1, keepdim=True)
    return (h.softmax(1) * h).mean() + (w * w).sum() / 7 + (x @ w.t()).amax() / 5


def in_one_program(mesh: Any, pick: int, spec: P) -> Any:
    """Some of the operands are DTensors, Parameters among them, the others ShardTensors."""
    torchs = mesh.device_mesh

    def lay(full: Tensor, place: int) -> Any:
        mine = P(*spec.entries[: full.ndim])
        if not pick >> place & 1:
            return weft.distribute_tensor(full, mesh, mine).requires_grad_()
        placements = weft.Layout(mesh, full.shape, mine).placements
        d = theirs.distribute_tensor(full, torchs, [
            SHARD(one.dim) if isinstance(one, weft.Shard) else REPLICATE for one in placements
        ])
        return nn.Parameter(d)

    leaves = [lay(full, place) for place, full in enumerate((X, W, B))]
    loss = mixed(*leaves)
    assert type(loss) is ShardTensor
    loss.backward()
    kinds = [type(leaf.grad) is type(leaf.data) or type(leaf.grad) for leaf in leaves]
    return loss.item(), [leaf.grad.full_tensor() for leaf in leaves], kinds


@pytest.mark.parametrize("spec", [P("dp"), P(None, "tp"), P("tp", "dp"), P()], ids=str)
@pytest.mark.parametrize("pick", [1, 2, 5, 6])
def test_operands_of_both_kinds(gloo: GlooWorld, pick: int, spec: P) -> None:
    plain = [one.clone().requires_grad_() for one in (X, W, B)]
    expected = mixed(*plain)
    expected.backward()
    for loss, grads, kinds in gloo.run(in_one_program, MESH, pick, spec):
        assert kinds == [True] * 3
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        for grad, leaf in zip(grads, plain):
            torch.testing.assert_close(grad, leaf.grad, rtol=1e-10, atol=1e-12)


def program(x: Tensor, out: Any, back: Any) -> Tensor:
    y = out(x) * 2  # here in the other library
    z = back(y.tanh())
    return (z * x).sum()


def across(mesh: Any, first: str, spec: P) -> Any:
    """Out and back, with a gradient of the gradient; a leaf of either library."""
    x = weft.distribute_tensor(X, mesh, spec)
    leaf: Any = x if first == "weft" else x.to_dtensor()
    leaf.requires_grad_()
    ways = (weft.to_dtensor, weft.from_dtensor)
    out, back = ways if first == "weft" else ways[::-1]
    (grad,) = torch.autograd.grad(program(leaf, out, back), leaf, create_graph=True)
    assert type(grad) is type(leaf)
    (second,) = torch.autograd.grad((grad * grad).sum(), leaf)
    return grad.detach().full_tensor(), second.full_tensor()


@pytest.mark.parametrize("first", ["weft", "dtensor"])
@pytest.mark.parametrize("spec", [P("dp", "tp"), P(("dp", "tp")), P()], ids=str)
def test_second_order_across_the_border(gloo: GlooWorld, first: str, spec: P) -> None:
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(program(x, torch.clone, torch.clone), x, create_graph=True)
    (second,) = torch.autograd.grad((grad * grad).sum(), x)
    for ours, ours_second in gloo.run(across, MESH, first, spec):
        torch.testing.assert_close(ours, grad.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours_second, second, rtol=1e-10, atol=1e-12)


def terms_cross(mesh: Any, kind: str) -> Any:
    """A gradient to terms that DTensor has made, and through terms that it is given."""
    full = theirs.distribute_tensor(X[:6], mesh.device_mesh, [SHARD(0), REPLICATE])
    leaf = nn.Parameter(full)
    made = leaf.sum(0) if kind == "sum" else leaf.mean(0)
    came = weft.from_dtensor(made)
    (came * came).sum().backward()
    x = weft.distribute_tensor(X[:6], mesh, P("dp")).requires_grad_()
    terms = x.to_local(grad_placements=[weft.Shard(0), weft.Replicate()])
    terms = terms.sum(0) if kind == "sum" else terms.mean(0)
    ours = ShardTensor.from_local(terms, mesh, P(partial={"dp": kind}), shape=(6,))
    given = weft.to_dtensor(ours)
    (given * given).sum().backward()
    return str(came.sharding), leaf.grad.full_tensor(), str(ours.sharding), x.grad.full_tensor()


@pytest.mark.parametrize("kind", ["sum", "avg"])
def test_gradients_of_terms(gloo: GlooWorld, kind: str) -> None:
    x = X[:6].clone().requires_grad_()
    value = x.sum(0) if kind == "sum" else x.mean(0)
    (value * value).sum().backward()
    for came, theirs_grad, ours, our_grad in gloo.run(terms_cross, MESH, kind):
        assert came == ours == f"[6] partial({kind}@dp)"
        torch.testing.assert_close(theirs_grad, x.grad, rtol=1e-12, atol=0)
        torch.testing.assert_close(our_grad, x.grad, rtol=1e-12, atol=0)


def trained(mesh: Any) -> Any:
    """torch's own parallel module: DTensor weights, an optimizer of torch's, ShardTensor input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(full_of(*parameter.shape) / 3 - 0.4)
    cut = {"0": ([REPLICATE, SHARD(0)], [REPLICATE, SHARD(0)]),
           "2": ([REPLICATE, SHARD(1)], [REPLICATE, REPLICATE])}

    def partition(name: str, module: nn.Module, torchs: Any) -> None:
        for (which, parameter), placements in zip(list(module.named_parameters(recurse=False)),
                                                  cut.get(name, ())):
            module.register_parameter(
                which, nn.Parameter(theirs.distribute_tensor(parameter, torchs, placements)))

    lay: Any = torch.clone
    if mesh is not None:
        theirs.distribute_module(model, mesh.device_mesh, partition)
        lay = lambda full: weft.distribute_tensor(full, mesh, P("dp"))  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        loss = F.mse_loss(model(lay(X + step)), lay(full_of(7, 3)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_of_dtensor_parameters(gloo: GlooWorld) -> None:
    expected = trained(None)
    for losses in gloo.run(trained, MESH):
        assert losses == pytest.approx(expected, rel=1e-10)


def descending(mesh: Any) -> Any:
    """What DTensor makes of a mesh whose ranks do not ascend."""
    d = theirs.distribute_tensor(full_of(5), DeviceMesh("cpu", [3, 2, 1, 0]), [SHARD(0)],
                                 src_data_rank=None)
    x = weft.from_dtensor(d)
    with pytest.raises(MeshError, match="DTensor gathers in ascending order"):
        weft.to_dtensor(x)
    return x.full_tensor(), torch.equal(d.full_tensor(), full_of(5))


def test_meshes_that_dtensor_mixes_up(gloo: GlooWorld) -> None:
    for whole, is_right in gloo.run(descending, MESH):
        assert torch.equal(whole, full_of(5))
        assert not is_right  # where it is, there is nothing to refuse


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return grad * b, grad * a


def around_calls(mesh: Any) -> Any:
    """What is no op: Functions, checkpoints, regions, state dicts, hooks, indices, gradients."""
    full = full_of(6, 4)
    x = weft.distribute_tensor(full, mesh, P("dp")).requires_grad_()
    d = nn.Parameter(theirs.distribute_tensor(full, mesh.device_mesh, [SHARD(0), REPLICATE]))
    seen: list[type] = []
    d.register_hook(lambda grad: seen.append(type(grad)))
    again = checkpoint(lambda a, b: a * b, x, d, use_reentrant=False)
    region = weft.local_map(torch.clone, in_specs=P("dp"), out_specs=P("dp"), mesh=mesh)(d)
    (Product.apply(x, d) + again + region).sum().backward()
    assert x.grad is not None and d.grad is not None and seen == [DTensor] * 1
    grads = x.grad.full_tensor(), d.grad.full_tensor()
    ours, other = nn.Linear(4, 6, bias=False).double(), nn.Linear(4, 6, bias=False).double()
    weft.distribute_module(ours, mesh, shardings={"weight": P(None, "tp")})
    other.weight = nn.Parameter(d.detach().clone())
    ours.load_state_dict(other.state_dict())
    with torch.no_grad():
        other.weight.zero_()
    loaded = ours.weight.full_tensor()
    other.load_state_dict(ours.state_dict())
    assert type(other.weight.data) is DTensor
    at = torch.tensor([0, 5, 2])
    rows = theirs.distribute_tensor(at, mesh.device_mesh, [SHARD(0), REPLICATE])
    picked = F.embedding(rows, x), x[rows], torch.where(d > 1, x, d)
    y = x * 2
    x.grad = None
    y.backward(gradient=d.detach())
    return grads, loaded, other.weight.full_tensor(), [
        one.full_tensor() for one in picked], x.grad.full_tensor()


def test_what_is_no_op(gloo: GlooWorld) -> None:
    full = full_of(6, 4)
    for grads, loaded, back, (looked, indexed, chosen), doubled in gloo.run(around_calls, MESH):
        assert torch.equal(grads[0], 2 * full) and torch.equal(grads[1], 2 * full + 1)
        assert torch.equal(loaded, full) and torch.equal(back, full)
        assert torch.equal(looked, full[[0, 5, 2]]) and torch.equal(indexed, full[[0, 5, 2]])
        assert torch.equal(chosen, full) and torch.equal(doubled, 2 * full)


def one_of_each(mesh: Any, foreach: bool) -> list[float]:
    """A model with parameters of both kinds, clipped together, in one optimizer."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(full_of(*parameter.shape) / 3 - 0.4)
    lay: Any = torch.clone
    if mesh is not None:
        weft.distribute_module(model[2], mesh, shardings={"weight": P(None, "dp")})
        for name, each in list(model[0].named_parameters()):
            model[0].register_parameter(name, nn.Parameter(
                theirs.distribute_tensor(each.detach(), mesh.device_mesh, [REPLICATE, SHARD(0)])))
        lay = lambda full: weft.distribute_tensor(full, mesh, P("dp"))  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=foreach)
    losses = []
    for _ in range(3):
        loss = F.mse_loss(model(lay(X)), lay(full_of(7, 3)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("foreach", [False, True])
def test_one_optimizer_for_parameters_of_both_kinds(gloo: GlooWorld, foreach: bool) -> None:
    expected = one_of_each(None, foreach)
    for losses in gloo.run(one_of_each, MESH, foreach):
        assert losses == pytest.approx(expected, rel=1e-10)


def on_part_of_the_world(mesh: Any) -> Any:
    """A mesh of two ranks, by either library; the others run the same program."""
    x = weft.distribute_tensor(full_of(5, 2), mesh, P("x"))
    d = weft.to_dtensor(x)
    inside = mesh.here is not None
    whole = d.full_tensor() if inside else None
    torchs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    column = theirs.distribute_tensor(full_of(5, 2) + mesh.rank // 2, torchs, [SHARD(0)],
                                      src_data_rank=None)
    back = weft.from_dtensor(column)
    return inside, d.shape, weft.from_dtensor(d).sharding, whole, back.full_tensor()


def test_meshes_that_are_part_of_the_world(gloo: GlooWorld) -> None:
    part = Mesh({"x": 2}, ranks=(1, 3))
    for rank, (inside, shape, layout, whole, column) in enumerate(
        gloo.run(on_part_of_the_world, part)
    ):
        assert inside == (rank in (1, 3)) and shape == (5, 2)
        assert str(layout) == "[5@x, 2]" and layout.mesh == part
        assert whole is None or torch.equal(whole, full_of(5, 2))
        assert torch.equal(column, full_of(5, 2) + rank // 2)


def migrated(mesh: Any) -> Any:
    d = theirs.distribute_tensor(
        torch.arange(32.0).view(8, 4), mesh.device_mesh, [SHARD(0), REPLICATE])
    return migration.run([line for line in migration.lines()
                          if line.section == migration.DTENSORS], mesh, d=d)


def test_the_lines_of_the_migration_page(gloo: GlooWorld) -> None:
    lines = [line for line in migration.lines() if line.section == migration.DTENSORS]
    assert len(lines) >= 5
    for found in gloo.run(migrated, MESH):
        assert found == [line.gives for line in lines]
