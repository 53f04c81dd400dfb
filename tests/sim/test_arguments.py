"""The arguments that torch's and PhysicsNeMo's calls take, under the names that they have there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.tensor as torchs

import weft
from weft import (
    LayoutError,
    MeshError,
    P,
    Partial,
    PlacementError,
    Replicate,
    Shard,
    ShardTensor,
    ShardTypeError,
    UnsupportedOpError,
)
from weft.transport import traffic

X = torch.arange(30.0, dtype=torch.float64).view(5, 6)


def on_two(fn: Any) -> list[Any]:
    return weft.testing.run(fn, mesh={"x": 2})


def on_four(fn: Any) -> list[Any]:
    return weft.testing.run(fn, mesh={"dp": 2, "tp": 2})


# redistribute(forward_dtype=, backward_dtype=)


@pytest.mark.parametrize("src", [P("x"), P(partial={"x": "sum"})], ids=str)
@pytest.mark.parametrize("dst", [P(), P(None, "x")], ids=str)
@pytest.mark.parametrize("async_op", [False, True])
def test_the_cast_comes_before_the_bytes_travel(src: P, dst: P, async_op: bool) -> None:
    full = torch.arange(20.0).view(5, 4) / 7

    def fn(mesh: Any) -> None:
        x = weft.distribute_tensor(full, mesh, src).requires_grad_()
        with traffic.record() as plain:
            x.redistribute(placements=dst).to_local()
        with traffic.record() as log:
            y = x.redistribute(placements=dst, forward_dtype=torch.bfloat16, async_op=async_op)
            local = y.to_local()
        assert y.dtype == local.dtype == torch.bfloat16
        assert y.requires_grad
        assert str(y.sharding) == str(x.redistribute(placements=dst).sharding)
        assert torch.equal(y.detach().full_tensor(), full.bfloat16())
        moved = [sum(event.nbytes for event in one.events) for one in (plain, log)]
        assert moved[0] == 2 * moved[1]
        assert mesh.rank or moved[1] > 0

    on_two(fn)


def test_gradients_are_cast_before_they_travel_and_come_back_in_the_tensors_dtype() -> None:
    full = torch.arange(20.0).view(5, 4) / 7
    weight = torch.arange(20.0).view(5, 4) / 11

    def fn(mesh: Any) -> None:
        sizes = {}
        for dtype in (None, torch.bfloat16, torch.float64):
            x = weft.distribute_tensor(full, mesh, P()).requires_grad_()
            y = x.redistribute(placements=P("x"), backward_dtype=dtype)
            assert y.dtype == torch.float32
            with traffic.record() as log:
                y.backward(weft.distribute_tensor(weight, mesh, P("x")))
            sizes[dtype] = sum(event.nbytes for event in log.events)
            assert x.grad is not None
            assert x.grad.dtype == torch.float32
            rounded = weight if dtype is None else weight.to(dtype).float()
            assert torch.equal(x.grad.full_tensor(), rounded)
        assert sizes[None] == 2 * sizes[torch.bfloat16]
        assert 2 * sizes[None] == sizes[torch.float64]

    on_two(fn)


def test_both_dtypes_and_no_backward_dtype_as_torch() -> None:
    """Without `backward_dtype` the gradient travels in the tensor's own dtype."""
    full = torch.arange(20.0).view(5, 4) / 7

    def fn(mesh: Any) -> None:
        x = weft.distribute_tensor(full, mesh, P()).requires_grad_()
        y = x.redistribute(placements=P("x"), forward_dtype=torch.bfloat16)
        with traffic.record() as log:
            y.backward(torch.ones_like(y))
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
        rows = (5 - y.to_local().shape[0]) * 4
        assert [event.nbytes for event in log.events] == [4 * rows]
        same = x.redistribute(placements=P(), forward_dtype=torch.bfloat16)  # nothing moves
        assert same.dtype == torch.bfloat16
        (back,) = torch.autograd.grad(same.sum(), x)
        assert back.dtype == torch.float32
        assert torch.equal(back.full_tensor(), torch.ones(5, 4))

    on_two(fn)


def test_second_gradients_pass_through_a_cast() -> None:
    full = torch.arange(20.0, dtype=torch.float64).view(5, 4) / 7

    def fn(mesh: Any) -> None:
        x = weft.distribute_tensor(full, mesh, P("x")).requires_grad_()
        y = x.redistribute(placements=P(), forward_dtype=torch.float32)
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert first.dtype == second.dtype == torch.float64
        expected = (6 * full.float()).double()
        assert torch.allclose(second.full_tensor(), expected, rtol=1e-6, atol=0)

    on_two(fn)


def test_dtypes_that_cannot_be() -> None:
    def fn(mesh: Any) -> None:
        mean = ShardTensor.from_local(X, mesh, [Partial("avg")])
        with pytest.raises(LayoutError, match="cannot carry int32"):
            mean.redistribute(placements=P(), forward_dtype=torch.int32)
        with pytest.raises(ShardTypeError, match=r"(?s)'bfloat16'.*torch\.bfloat16"):
            mean.redistribute(placements=P(), forward_dtype="bfloat16")  # type: ignore[arg-type]
        x = weft.distribute_tensor(X, mesh, P()).requires_grad_()
        product = x.redistribute(placements=[Partial("product")])
        with pytest.raises(UnsupportedOpError, match="product"):
            product.redistribute(placements=P(), forward_dtype=torch.float32)

    on_two(fn)


# from_local


def test_from_local_takes_sharding_shapes_as_its_fourth_argument() -> None:
    def fn(mesh: Any) -> None:
        local = X[:3].clone() if mesh.rank == 0 else X[3:].clone()
        for how in ("infer", {0: [(3, 6), (2, 6)]}):
            x = ShardTensor.from_local(local, mesh, [Shard(0)], how)
            assert torch.equal(x.full_tensor(), X)
        even = ShardTensor.from_local(X.clone(), mesh, [Shard(0)], "chunk", shape=(10, 6))
        assert str(even.sharding) == "[10@x, 6]"
        named = ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes="infer")
        assert str(named.sharding) == str(x.sharding)
        with pytest.raises(LayoutError, match="sharding_shapes"):
            ShardTensor.from_local(local, mesh, [Shard(0)], "chunk", sizes={0: (3, 2)})
        with pytest.raises(LayoutError, match="'blind'"):
            ShardTensor.from_local(local, mesh, [Shard(0)], "blind")

    on_two(fn)


@pytest.mark.parametrize(
    ("placed", "grads", "expected"),
    [
        (Replicate(), None, "value"), (Replicate(), Replicate(), "value"),
        (Replicate(), Partial(), "term"), (Replicate(), Partial("avg"), "value"),
        (Shard(0), Shard(0), "value"), (Partial(), Replicate(), "value"),
        (Partial(), Partial(), "term"), (Partial("avg"), None, "half"),
    ],
    ids=str,
)
def test_from_local_gives_gradients_as_they_are_placed(
    placed: Any, grads: Any, expected: str
) -> None:
    """"term": the gradients of the ranks add up to that of the value."""

    def fn(mesh: Any) -> torch.Tensor:
        local = X.clone().requires_grad_()
        given = None if grads is None else [grads]
        x = ShardTensor.from_local(local, mesh, [placed], grad_placements=given)
        (x * 3).sum().backward()
        assert local.grad is not None
        return local.grad

    found = on_two(fn)
    if expected == "term":
        assert torch.equal(found[0] + found[1], torch.full_like(X, 3))
        assert not torch.equal(found[0], torch.full_like(X, 3)) or not found[1].any()
    else:
        value = 1.5 if expected == "half" else 3.0
        for one in found:
            assert torch.equal(one, torch.full_like(X, value))


def test_gradients_of_another_form_than_the_local_tensor_are_refused() -> None:
    def fn(mesh: Any) -> None:
        local = X.clone().requires_grad_()
        with pytest.raises(PlacementError, match=r"(?s)from_local\(grad_pl.*x: Replicate"):
            ShardTensor.from_local(local, mesh, [Shard(0)], grad_placements=[Replicate()])

    on_two(fn)


# Factories


FACTORIES: dict[str, Any] = {
    "zeros": lambda **where: weft.zeros(5, 6, **where),
    "ones": lambda **where: weft.ones((5, 6), **where),
    "empty": lambda **where: weft.empty([5, 6], **where),
    "full": lambda **where: weft.full((5, 6), 2.0, **where),
    "rand": lambda **where: weft.rand(5, 6, **where),
    "randn": lambda **where: weft.randn(5, 6, **where),
    "randint": lambda **where: weft.randint(3, (5, 6), **where),
    "arange": lambda **where: weft.arange(5, **where),
    "randperm": lambda **where: weft.randperm(5, **where),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_take_torchs_names(name: str) -> None:
    def fn(mesh: Any) -> None:
        make = FACTORIES[name]
        ours = make(mesh=mesh, spec=P("tp"))
        for placements in ([Replicate(), Shard(0)], P("tp"), (torchs.Replicate(), torchs.Shard(0))):
            made = make(device_mesh=mesh, placements=placements, layout=torch.strided)
            assert made.sharding == ours.sharding
            assert made.dtype == ours.dtype
        assert make(device_mesh=mesh, spec=P("tp")).sharding == ours.sharding
        assert make(mesh=mesh, placements=ours).sharding == ours.sharding
        with pytest.raises(ShardTypeError, match=r"(?s)device_mesh.*mesh.*once"):
            make(mesh=mesh, device_mesh=mesh, spec=P("tp"))
        with pytest.raises(ShardTypeError, match=r"(?s)placements.*spec.*once"):
            make(mesh=mesh, placements=P("tp"), spec=P("tp"))
        with pytest.raises(UnsupportedOpError, match=r"(?s)layout=.*torch.sparse_coo"):
            make(mesh=mesh, spec=P("tp"), layout=torch.sparse_coo)
        with pytest.raises(ShardTypeError, match=rf"(?s)weft.{name}.*layout=.*placements=\.\.\."):
            make(mesh=mesh, layout=ours.sharding)
        with pytest.raises(TypeError, match=rf"^weft.{name}.devise_mesh="):
            make(devise_mesh=mesh)

    on_four(fn)


@pytest.mark.parametrize("name", ["zeros", "rand", "randn", "full", "ones", "empty", "arange"])
def test_factories_take_dtype_and_requires_grad(name: str) -> None:
    def fn(mesh: Any) -> None:
        made = FACTORIES[name](
            device_mesh=mesh, placements=P("tp"), dtype=torch.float64, requires_grad=True)
        assert made.dtype == torch.float64
        assert made.requires_grad
        assert made.is_leaf

    on_four(fn)


SIZES: dict[str, tuple[Any, str]] = {
    'weft.randn(4, 4, P("dp"))': (lambda mesh: weft.randn(4, 4, P("dp")), "placements=P('dp')"),
    "weft.zeros(4, [Shard(0)])": (lambda mesh: weft.zeros(4, [Shard(0)]), "placements="),
    "weft.zeros((4, 4), mesh)": (lambda mesh: weft.zeros((4, 4), mesh), "mesh=mesh"),
    "weft.zeros(4, mesh, P())": (lambda mesh: weft.zeros(4, mesh, P()), "mesh=mesh, placements=P"),
    "weft.ones(4, 2.5)": (lambda mesh: weft.ones(4, 2.5), "2.5"),
}


@pytest.mark.parametrize("call", SIZES)
def test_a_size_that_is_none_is_told_from_where_a_tensor_lies(call: str) -> None:
    run, fix = SIZES[call]

    def fn(mesh: Any) -> None:
        with pytest.raises(ShardTypeError) as caught:
            run(mesh)
        assert fix in str(caught.value).split("Fix: ")[-1] or fix == "2.5"
        assert str(caught.value).startswith(call.split("(")[0])

    on_four(fn)


# Where placements stand in the place of the mesh


@pytest.mark.parametrize("placements", [
    P("tp"), [Replicate(), Shard(0)], (torchs.Replicate(), torchs.Shard(0)),
], ids=str)
def test_placements_may_stand_first_where_the_mesh_is_known(placements: Any) -> None:
    def fn(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P("dp"))
        moved = x.redistribute(placements)
        assert str(moved.sharding) == "[5@tp, 6]"
        assert x.redistribute(moved.sharding).sharding == moved.sharding
        assert x.redistribute(moved).sharding == moved.sharding
        assert torch.equal(moved.full_tensor(), X)
        with mesh:
            assert weft.distribute_tensor(X, placements).sharding == moved.sharding
            again = ShardTensor.from_local(moved.to_local(), placements, sizes={0: (3, 2)})
            assert again.sharding == moved.sharding
        with pytest.raises(ShardTypeError, match=r"(?s)mesh is.*Fix: placements=P\('tp'\)"):
            x.redistribute(P("tp"), P("dp"))

    on_four(fn)


# Meshes and modules


def test_init_mesh_takes_torchs_order_and_names() -> None:
    def on_rank(_: Any) -> None:
        due = weft.init_mesh({"dp": 2, "tp": 2})
        assert weft.init_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) is due
        assert weft.init_mesh((2, 2), mesh_dim_names=["dp", "tp"]) is due
        assert weft.init_mesh("cpu", [2, 2]) is weft.init_mesh((2, 2))
        assert weft.init_mesh(4, mesh_dim_names=("dp",)).mesh_dim_names == ("dp",)
        assert weft.init_mesh("cpu", {"dp": 2, "tp": 2}) is due  # type: ignore[arg-type]
        wrong: list[Any] = [("dp",), ("dp", "dp"), ("dp", "tp", "cp"), "dp"]
        for names in wrong:
            with pytest.raises(MeshError, match="one name for each size"):
                weft.init_mesh("cpu", (2, 2), mesh_dim_names=names)
        with pytest.raises(MeshError, match="a map of axes has its names"):
            weft.init_mesh({"dp": 2}, mesh_dim_names=("dp",))
        with pytest.raises(ShardTypeError, match=r'(?s)no sizes.*weft.init_mesh\({"dp": 2'):
            weft.init_mesh("cpu")

    on_four(on_rank)


def test_a_map_in_the_place_of_a_function_is_told_as_shardings() -> None:
    def fn(mesh: Any) -> None:
        with pytest.raises(ShardTypeError) as told:
            weft.distribute_module(
                torch.nn.Linear(2, 2), mesh, {"weight": P("dp")})  # type: ignore[arg-type]
        assert str(told.value) == """\
distribute_module(partition_fn): it is a map of 1 patterns.
  Rule: the third argument is a function, as in torch; patterns of names are given as shardings=.
  Offenders: 'weight'
  Fix: distribute_module(module, mesh, shardings={'weight': P('dp')})"""

    on_four(fn)


def test_a_spec_of_too_many_entries_shows_those_that_fit() -> None:
    def fn(mesh: Any) -> None:
        with pytest.raises(PlacementError) as told:
            weft.distribute_module(
                torch.nn.Linear(2, 2), mesh, shardings={"*": P("dp", "tp")})
        assert str(told.value).splitlines()[-1] == (
            "  Fix: P('dp'); a spec that is for tensors of several sorts names each sort by a "
            "pattern of its own")
        assert told.value.__notes__[-1] == "  in distribute_module, for bias"

    on_four(fn)
