"""Our placements and default cuts against torch's own DTensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as TorchStrided

from tests.pure.test_core_layout import orders
from weft.core import (
    KINDS,
    Layout,
    Mesh,
    P,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    as_mesh,
)
from weft.errors import PlacementError

MESHES = [(2,), (3,), (2, 2), (2, 3), (3, 2), (1, 4), (2, 2, 2), (2, 1, 3)]
REFUSED = {(3, 2): 2, (2, 2, 2): 4}
"""Uneven cases in which torch's strided shards are not the boxes of the order they encode."""
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 12, 13)


def to_torch(placement: Placement) -> object:
    match placement:
        case Shard(dim):
            return TorchShard(dim)
        case StridedShard(dim, factor):
            return TorchStrided(dim, split_factor=factor)
        case Partial(kind):
            return TorchPartial(kind)
        case _:
            return TorchReplicate()


def torch_box(
    shape: Sequence[int], mesh: Mesh, coordinate: Sequence[int], placements: Sequence[object]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, global offset) by torch's arithmetic; no process group is needed."""
    return _compute_local_shape_and_global_offset(
        tuple(shape), mesh.shape, list(coordinate), placements  # type: ignore[arg-type]
    )


def torch_indices(
    length: int, mesh: Mesh, coordinate: Sequence[int], placements: Sequence[object]
) -> list[int]:
    """What torch's placements, applied left to right, leave of `arange(length)`."""
    local = torch.arange(length)
    for axis, placement in enumerate(placements):
        if isinstance(placement, (TorchShard, TorchStrided)):
            parts, _ = placement._split_tensor(local, mesh.shape[axis], with_padding=False)
            local = parts[coordinate[axis]]
    return local.tolist()


def check_box(layout: Layout, placements: Sequence[object], coordinate: Sequence[int]) -> None:
    box = layout.box_at(coordinate)
    shape, offset = torch_box(layout.shape, layout.mesh, coordinate, placements)
    assert layout.local_shape_at(coordinate) == shape
    for (start, stop), torch_start in zip(box, offset):
        assert start == stop or start == torch_start  # of an empty shard torch has no start


@pytest.mark.parametrize("sizes", MESHES)
def test_default_cuts_are_torchs(sizes: tuple[int, ...]):
    mesh = Mesh(sizes)
    uses = [Shard(0), Shard(1), Replicate()]
    for placements in product(uses, repeat=len(sizes)):
        theirs = [to_torch(placement) for placement in placements]
        for shape in product(LENGTHS, (5, 6)):
            layout = Layout(mesh, shape, theirs)  # type: ignore[arg-type]
            assert layout == Layout(mesh, shape, placements)
            for rank in range(mesh.size()):
                check_box(layout, theirs, mesh.coordinate(rank))


@pytest.mark.parametrize("sizes", MESHES)
def test_every_order_of_axes_is_torchs_strided_shard(sizes: tuple[int, ...]):
    """Where torch's boxes are boxes of that order they are taken, and no others."""
    mesh = Mesh(sizes)
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size())]
    taken = refused = 0
    for dims in orders(len(sizes)):
        for length in LENGTHS if dims[0] else ():
            layout = Layout.make(mesh, (length, 4), dims)
            theirs = [to_torch(placement) for placement in layout.placements]
            mine = [theirs[axis] if axis in dims[0] else TorchReplicate()
                    for axis in range(len(sizes))]
            same = all(
                torch_indices(length, mesh, at, mine) == list(range(*layout.box_at(at)[0]))
                for at in coordinates
            )
            strided = any(isinstance(placement, TorchStrided) for placement in mine)
            if length % math.prod(mesh.shape[axis] for axis in dims[0]) == 0:
                assert same
            if not same:
                assert strided
                with pytest.raises(PlacementError, match="no boxes of an order"):
                    Layout(mesh, (length,), mine)  # type: ignore[arg-type]
                refused += 1
                continue
            taken += strided
            accepted = Layout(mesh, (length,), mine)  # type: ignore[arg-type]
            assert [accepted.box_at(at) for at in coordinates] == [
                layout.box_at(at)[:1] for at in coordinates]
            for at in coordinates:
                check_box(accepted, mine, at)
    assert taken > 0 or len(sizes) == 1
    assert refused == REFUSED.get(sizes, 0)


def test_a_flattened_dim_is_refused():
    """torch's view of (4, 6) with dim 1 cut as one dim of 24: no order of axes."""
    with pytest.raises(PlacementError, match="flattened dim"):
        Layout(Mesh((2,)), (24,), [TorchStrided(0, split_factor=4)])  # type: ignore[list-item]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_text_of_shard_is_torchs(dim: int):
    assert (repr(Shard(dim)), str(Shard(dim))) == (repr(TorchShard(dim)), str(TorchShard(dim)))
    for asked in (None, 0, 1, -1):
        assert Shard(dim).is_shard(asked) == TorchShard(dim).is_shard(asked)
    assert Shard(dim).is_replicate() == TorchShard(dim).is_replicate()
    assert Shard(dim).is_partial() == TorchShard(dim).is_partial()


def test_text_of_the_others_is_torchs():
    assert (repr(Replicate()), str(Replicate())) == (repr(TorchReplicate()), str(TorchReplicate()))
    assert str(StridedShard(1, 2)) == str(TorchStrided(1, split_factor=2))
    for kind in KINDS:
        ours, theirs = Partial(kind), TorchPartial(kind)
        assert (repr(ours), str(ours), ours.reduce_op) == (repr(theirs), str(theirs), kind)
        for asked in (None, *KINDS):
            assert ours.is_partial(asked) == theirs.is_partial(asked)
    assert Partial() == Partial(TorchPartial().reduce_op)
    assert (StridedShard(0, 1) == Shard(0)) == (TorchStrided(0, split_factor=1) == TorchShard(0))


def test_kinds_arrive_from_torch():
    layout = Layout(Mesh((2, 2)), (4,), [TorchPartial("max"), TorchReplicate()])  # type: ignore[list-item]
    assert layout.placements == (Partial("max"), Replicate())


def test_a_torch_device_mesh_is_a_mesh():
    theirs = DeviceMesh("cpu", torch.tensor([[3, 2], [1, 0]]), mesh_dim_names=("dp", "tp"),
                        _init_backend=False, _rank=0)
    layout = Layout(theirs, (4,), [TorchShard(0), TorchReplicate()])  # type: ignore[arg-type,list-item]
    assert layout.mesh == Mesh({"dp": 2, "tp": 2}, ranks=(3, 2, 1, 0))
    assert layout.box(0) == ((2, 4),)
    assert layout.mesh.mesh_dim_names == theirs.mesh_dim_names
    for ask in ("size", "ndim", "shape"):
        ours, torchs = getattr(layout.mesh, ask), getattr(theirs, ask)
        assert ours() == torchs() if callable(ours) else ours == torchs
    unnamed = DeviceMesh("cpu", torch.arange(4), _init_backend=False, _rank=0)
    assert as_mesh(unnamed) == Mesh((4,))


SAME = [
    (Shard(0), TorchShard(0)), (Shard(-1), TorchShard(-1)), (Replicate(), TorchReplicate()),
    *[(Partial(kind), TorchPartial(kind)) for kind in ("sum", "avg", "max", "min", "product")],
]


@pytest.mark.parametrize(("ours", "theirs"), SAME, ids=lambda one: str(one))
def test_torchs_placements_are_equal_to_ours_both_ways(ours, theirs):
    assert ours == theirs
    assert theirs == ours
    assert (ours != theirs, theirs != ours) == (False, False)
    assert hash(ours) == hash(theirs)
    assert len({ours, theirs}) == 1
    assert {theirs: "found"}[ours] == "found"
    for other, torchs in SAME:
        if other is not ours:
            assert other != theirs
            assert torchs != ours


def test_placements_of_a_layout_are_equal_to_torchs():
    layout = Layout(Mesh({"dp": 2, "tp": 2, "cp": 2}), (4, 6), P("tp", partial={"cp": "sum"}))
    torchs: tuple[object, ...] = (TorchReplicate(), TorchShard(0), TorchPartial())
    assert layout.placements == torchs
    assert torchs == layout.placements
    assert hash(torchs) == hash(layout.placements)


def test_what_torch_cannot_say_is_equal_to_none_of_its_placements():
    ragged = Shard(0, sizes=(1, 3))
    assert ragged != TorchShard(0)
    assert TorchShard(0) != ragged
    # Of lengths that do not divide torch's means other boxes, so it is equal from neither side.
    strided, torchs = StridedShard(0, 2), TorchStrided(0, split_factor=2)
    assert strided != torchs
    assert torchs != strided
    assert Shard(0) != torchs
    assert Shard(0) != "Shard(dim=0)"
    assert Replicate() is not None
    assert Replicate() != None  # noqa: E711
