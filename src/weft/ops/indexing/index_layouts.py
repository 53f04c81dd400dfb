"""The layouts of the positions that indices name, for reads and writes by index.

A tensor is read or written at *positions*: new dims, those of the indices broadcast together,
before or between the dims that are kept. The mesh axes that shard the indexed dims shard the
positions: so a shuffle of a sharded batch is a sharded batch, and no rank has more than its share
of the result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from weft.comm import BoundMesh
from weft.core import Layout

__all__ = ["Axes", "Cuts", "IndexLayout", "askers", "held", "index_layout"]

Axes = tuple[int, ...]
Cuts = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """The layouts of the positions.

    Args:
        shared: the layout of indices that the group over the sharding axes shares.
        parted: the layout in which each rank has the units that it names; the same where each rank
            knows only its own indices.
        over: the dim of `parted` that is sharded in addition; None where the two are the same.
    """

    shared: Layout
    parted: Layout
    over: int | None


def index_layout(
    x: Layout, dims: Sequence[int], shape: Sequence[int], operands: Sequence[Layout],
    beside: Collection[int],
) -> IndexLayout:
    """The layouts of the positions, of this shape, that `operands` broadcast to, for a tensor that
    is read or written in `dims`. The axes that shard these dims may shard the positions, and so may
    those in `beside`.
    """
    mesh, sizes = x.mesh, x.mesh.axis_sizes
    cutting = tuple(axis for dim in dims for axis in x.dims[dim])
    axes, cuts = held(shape, operands, {*cutting, *beside})
    found = {axis for each in axes for axis in each}
    if found.issuperset(cutting):
        own = Layout.make(mesh, shape, axes, cuts)
        return IndexLayout(own, own, None)
    if not found.isdisjoint(cutting):
        axes, cuts = held(shape, operands, beside)
    shared = Layout.make(mesh, shape, axes, cuts)
    count = math.prod(sizes[axis] for axis in cutting)
    over = next((dim for dim, length in enumerate(shape) if length >= count), None)
    if over is None:
        over = max(range(len(shape)), key=lambda dim: shape[dim])
    parted, whole = shared.divided(over, cutting), [dim for dim in dims if x.dims[dim]]
    if not axes[over] and len(whole) == 1 and x.shape[whole[0]] == shape[over]:
        parted = parted.recut(over, shape[over], x.cuts[whole[0]])
    return IndexLayout(shared, parted, over)


def held(
    shape: Sequence[int], operands: Sequence[Layout], allowed: Collection[int]
) -> tuple[list[Axes], list[Cuts]]:
    """Axes and cuts of each dim, from the first operand that is sharded in it; operands broadcast
    to the shape."""
    axes_of: list[Axes] = []
    cuts_of: list[Cuts] = []
    taken: set[int] = set()
    for dim, length in enumerate(shape):
        axes, cuts = (), None
        for one in operands:
            at = dim - len(shape) + one.ndim
            if at < 0 or one.shape[at] != length:
                continue
            axes = tuple(axis for axis in one.dims[at] if axis in allowed and axis not in taken)
            if axes:
                cuts = one.cuts[at] if axes == one.dims[at] else None
                break
        taken.update(axes)
        axes_of.append(axes)
        cuts_of.append(cuts)
    return axes_of, cuts_of


def askers(mesh: BoundMesh, places: IndexLayout, axes: Sequence[int]) -> torch.Tensor:
    """Which rank of the group over `axes`, in their order, names each position of `places.shared`,
    as a position in the group."""
    assert mesh.here is not None and places.over is not None
    over, here = places.over, mesh.here
    shape = places.shared.local_shape_at(here)
    start, stop = places.shared.box_at(here)[over]
    line = torch.zeros(stop - start, dtype=torch.int64)
    for place, coordinate in enumerate(mesh.along(axes, here)):
        first, last = places.parted.box_at(coordinate)[over]
        line[first - start : last - start] = place
    line = line.to(mesh.device)
    return line.view([-1 if dim == over else 1 for dim in range(len(shape))]).expand(shape)
