"""DTensors in and out, as every rank sees it; the fake backend stands for the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft
from tests.pure.test_core_layout import orders
from weft import (
    Layout,
    LayoutError,
    Mesh,
    MeshError,
    P,
    PlacementError,
    ShardTensor,
    ShardTypeError,
    UnsupportedOpError,
)

USES = (theirs.Shard(0), theirs.Shard(1), theirs.Replicate(), theirs.Partial("sum"))


@pytest.fixture(params=[0, 5])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=request.param, world_size=6, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def block(mesh: DeviceMesh, placements: Any, shape: Any, grad: bool = False) -> DTensor:
    """The DTensor of these placements, with torch's own local shape."""
    length, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    strides = torch.empty(shape, device="meta").stride()
    local = torch.rand(length).requires_grad_(grad)
    return DTensor.from_local(local, mesh, placements, shape=torch.Size(shape), stride=strides)


@pytest.mark.parametrize("names", [None, ("a", "b")])
def test_every_pair_of_placements_passes_both_ways(rank: int, names: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=names)
    for placements in product(USES, repeat=2):
        for shape in ((5, 7), (1, 6), (0, 4)):
            d = block(mesh, placements, shape)
            x = weft.from_dtensor(d)
            assert x.sharding == Layout(mesh, shape, placements)  # type: ignore
            assert x.to_local().data_ptr() == d._local_tensor.data_ptr()
            assert x.stride() == d.stride()
            back = weft.to_dtensor(x)
            assert (back.placements, back.shape, back.stride()) == (
                d.placements, d.shape, d.stride())
            assert back.device_mesh is mesh
            assert back._local_tensor.data_ptr() == d._local_tensor.data_ptr()


def test_orders_of_axes_are_torchs_own(rank: int) -> None:
    """Against what torch makes of an order of axes, and against its boxes."""
    mesh = init_device_mesh("cpu", (3, 1, 2), mesh_dim_names=("a", "b", "c"))
    said = 0
    for dims in orders(3):
        layout = Layout.make(weft.as_bound_mesh(mesh), (12, 6), dims)
        x = weft.zeros(12, 6, mesh=mesh, spec=layout)
        d = weft.to_dtensor(x)
        entries = tuple(ShardOrderEntry(dim, axes) for dim, axes in enumerate(dims) if axes)
        plain = tuple(
            theirs.Shard(on) if isinstance(on := layout.on(axis), int) else theirs.Replicate()
            for axis in range(3)
        )
        expected = DTensorSpec._convert_shard_order_to_StridedShard(entries, plain, mesh)
        assert d.placements == tuple(expected)
        _, starts = compute_local_shape_and_global_offset((12, 6), mesh, d.placements)
        assert tuple(start for start, _ in layout.box(rank)) == starts
        said += d.placements != plain
        # torch's other spelling of the order stands beside the placements
        meta = TensorMeta(torch.Size((12, 6)), (6, 1), torch.float32)
        spec = DTensorSpec(mesh, plain, meta, shard_order=entries)
        ordered = DTensor(x.to_local(), spec, requires_grad=False)  # type: ignore[call-arg]
        assert weft.from_dtensor(ordered).sharding == layout
    assert said > 0


def test_views_keep_their_strides(rank: int) -> None:
    mesh = init_device_mesh("cpu", (6,))
    d = block(mesh, [theirs.Shard(0)], (7, 5)).t()
    x = weft.from_dtensor(d)
    assert (x.stride(), x.shape) == (d.stride(), d.shape) == ((1, 5), (5, 7))
    assert weft.to_dtensor(x).stride() == (1, 5)
    number = weft.from_dtensor(block(mesh, [theirs.Partial()], ()))
    assert str(number.sharding) == "[] partial(sum@0)"
    assert weft.to_dtensor(number).placements == (theirs.Partial("sum"),)


def test_names_of_a_mesh_of_the_same_ranks(rank: int) -> None:
    mesh, named = init_device_mesh("cpu", (2, 3)), weft.init_mesh({"dp": 2, "tp": 3})
    d = block(mesh, [theirs.Shard(0), theirs.Replicate()], (4, 4))
    assert str(ShardTensor.from_dtensor(d, named).sharding) == "[4@dp, 4]"
    x = weft.ones(4, 4, mesh=named, spec=P(None, "tp"))
    assert x.to_dtensor(mesh).device_mesh is mesh
    assert x.to_dtensor().device_mesh.mesh_dim_names == ("dp", "tp")
    for one, other in ((x, d), (d, x)):  # one operand says how axes are called
        assert str((one + other).sharding.mesh) == str(named.abstract)
    with pytest.raises(MeshError, match=r"both meshes have the same sizes and ranks"):
        weft.from_dtensor(d, weft.init_mesh({"dp": 3, "tp": 2}))
    with pytest.raises(MeshError, match=r"both meshes have the same sizes and ranks"):
        weft.to_dtensor(x, init_device_mesh("cpu", (6,)))
    with pytest.raises(MeshError, match=r"all operands of one call live on one mesh"):
        d + weft.ones(4, 4, mesh=weft.init_mesh({"x": 6}))


SAYS_NOT = [
    (P("a"), {0: (5, 1, 1)}, "dim 0, sharded over (a) into explicit sizes (5, 1, 1)",
     "[Shard(dim=0), Replicate()]"),
    (P(("b", "a")), {}, "dim 0 of length 7, sharded unevenly over (b, a) in this order",
     "[Shard(dim=0), Shard(dim=0)]"),
    (P(None, "a", partial={"b": "band"}), {}, "band@b", "[Shard(dim=1), Replicate()]"),
    (P(partial={"a": "sum", "b": "avg"}), {}, "sum@a, avg@b", "[Replicate(), Replicate()]"),
]


@pytest.mark.parametrize(("spec", "sizes", "named", "fix"), SAYS_NOT)
def test_what_dtensor_cannot_say_is_refused(
    rank: int, spec: P, sizes: Any, named: str, fix: str
) -> None:
    mesh = weft.init_mesh({"a": 3, "b": 2})
    layout = Layout(mesh, (7, 5), spec, sizes)
    dtype = torch.int64 if "band" in named else torch.float32
    x = ShardTensor.from_local(torch.ones(layout.local_shape(rank), dtype=dtype), mesh, layout)
    with pytest.raises(PlacementError) as caught:
        weft.to_dtensor(x)
    assert named in str(caught.value)
    assert f"weft.to_dtensor(x.redistribute(placements={fix}))" in str(caught.value)


def test_what_weft_has_no_word_for_is_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (6,))
    masked = DTensor.from_local(
        torch.ones(4), mesh, [_MaskPartial(offset_shape=(4,), offset_dim=0)]
    )
    flat = DTensor.from_local(torch.ones(4), mesh, [_StridedShard(0, split_factor=4)],
                              shape=torch.Size((24,)), stride=(1,))
    for d in (masked, flat):
        with pytest.raises(PlacementError, match=r"redistribute\(placements=\[Replicate"):
            weft.from_dtensor(d)
        match = "masked partial values and flattened dims"
        with pytest.raises(PlacementError, match=match), weft.strict():
            d + weft.ones(*d.shape, mesh=mesh)
    for wrong in (torch.ones(3), None, weft.ones(3, mesh=mesh)):
        with pytest.raises(ShardTypeError, match="takes torch's DTensor"):
            weft.from_dtensor(wrong)
    with pytest.raises(ShardTypeError, match="takes a ShardTensor"):
        weft.to_dtensor(torch.ones(3))  # type: ignore
    short = DTensor.from_local(torch.ones(3), mesh, [theirs.Shard(0)],
                               shape=torch.Size((20,)), stride=(1,))
    with pytest.raises(LayoutError, match=r"which asks the ranks for their sizes"):
        weft.from_dtensor(short)


def test_terms_whose_gradients_differ_are_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (6,))
    for kind in ("max", "product"):
        d = block(mesh, [theirs.Partial(kind)], (3,), grad=True)
        with pytest.raises(PlacementError, match="requires a gradient"):
            weft.from_dtensor(d)
        x = weft.from_dtensor(block(mesh, [theirs.Partial(kind)], (3,)))
        assert weft.to_dtensor(x).placements == (theirs.Partial(kind),)
        with pytest.raises(PlacementError, match="requires a gradient"):
            weft.to_dtensor(x.requires_grad_())


def test_writes_to_a_dtensor(rank: int) -> None:
    mesh = init_device_mesh("cpu", (6,))
    d = block(mesh, [theirs.Shard(0)], (12, 2))
    before, version = d._local_tensor.clone(), d._version
    x = weft.ones(12, 2, mesh=mesh, spec=P(0))
    d += x
    assert type(d) is DTensor and d._version > version
    assert torch.equal(d._local_tensor, before + 1)
    assert torch.mul(x, 2, out=d) is d
    assert torch.equal(d._local_tensor, torch.full((2, 2), 2.0))
    d[:] = x
    assert torch.equal(d._local_tensor, torch.ones(2, 2))
    parameter = torch.nn.Parameter(d)
    with pytest.raises(UnsupportedOpError, match="has no place in its graph"):
        parameter.add_(x)
    with torch.no_grad():
        assert parameter.copy_(x * 3) is parameter
    assert torch.equal(parameter._local_tensor, torch.full((2, 2), 3.0))


def test_calls_without_a_shardtensor_stay_dtensors(rank: int) -> None:
    mesh = init_device_mesh("cpu", (6,))
    d = block(mesh, [theirs.Replicate()], (4, 4))
    for result in (d + d, torch.cat([d, d]), torch.nn.functional.linear(d, d)):
        assert type(result) is DTensor


def test_entries_take_dtensors_as_what_they_are(rank: int) -> None:
    mesh = init_device_mesh("cpu", (6,))
    d = block(mesh, [theirs.Shard(0)], (12, 2))
    assert str(weft.distribute_tensor(d, mesh, P(0)).sharding) == "[12@0, 2]"
    with pytest.raises(LayoutError, match="distributed as"):
        weft.distribute_tensor(d, mesh, P())
    assert str(weft.spmd.mark_sharding(d, mesh, (0, None)).sharding) == "[12@0, 2]"
    with pytest.raises(ShardTypeError, match="from_dtensor"):
        ShardTensor.from_local(d, mesh, P(0))
    x = weft.ones(12, 2, mesh=mesh, spec=P(0)).requires_grad_()
    x.grad = d
    assert torch.equal(x.grad.to_local(), d._local_tensor)


def test_without_process_groups() -> None:
    def program(mesh: Mesh) -> None:
        with pytest.raises(MeshError, match="has no process groups"):
            weft.to_dtensor(weft.ones(4, mesh=mesh))

    weft.testing.run(program, 2)
