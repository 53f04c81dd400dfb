"""`as_strided`, if a rank's own memory has all elements of the view, or windows along a dim.

In the dims inside of all sharded dims, a block has the strides of the global tensor; in
those outside, the strides are smaller by one factor. So a view that steps through these dims from
the tensor's beginning can be read from the block, if the sharded dims stay as they are. A single
element of a tensor is an index. Windows along a sharded dim are those of `unfold`, which fetches
the rows that they share with other shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from weft.core import Layout
from weft.errors import UnsupportedOpError
from weft.rules import op, page
from weft.tensor.meta import contiguous_strides, is_dense
from weft.tensor.modes import check_traced
from weft.tensor.placing.layouts import local_to_sharded
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.views.moved import Moved
from weft.transport.order import memory_order, strides_in_order

__all__ = ["PAGE"]

Ints = tuple[int, ...]


def _as_strided(
    input: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """`torch.as_strided`, without other ranks' memory."""
    check_traced("as_strided")  # a tracer asks what memory its arguments have
    meta, size, stride = input._meta, tuple(size), tuple(stride)
    if len(size) != len(stride):
        raise RuntimeError("mismatch in length of strides and shape")
    layout = meta.layout
    cut = [dim for dim, axes in enumerate(layout.dims) if axes]
    if storage_offset is None:
        if size == meta.shape and stride == meta.stride():
            return input.view(size)
        if cut and not size:
            return input[(0,) * len(meta.shape)]
    wrong = _wrong(input, size, stride, storage_offset, cut)
    windows = None
    if wrong and storage_offset is None:
        windows = _windows(meta.shape, meta.stride(), size, stride)
    if windows is not None:
        first, last, length, step = windows
        found = input.flatten(first, last).unfold(first, length, step)
        return found.narrow(first, 0, size[first]).movedim(-1, first + 1)
    if wrong:
        raise UnsupportedOpError(
            f"as_strided({size}, {stride})",
            f"{wrong}; the tensor is {layout}, of strides {meta.stride()}",
            "as_strided reads a rank's own memory: sharded dims stay as they are, outside "
            "those that it steps through; or windows along a dim", [str(layout)],
            f"x.redistribute(placements=P()).as_strided({size}, {stride})")
    new = Layout.make(
        layout.mesh, size, [layout.dims[dim] if dim in cut else () for dim in range(len(size))],
        [layout.cuts[dim] if dim in cut else None for dim in range(len(size))], layout.partial,
    )
    if meta.mesh.here is None:
        local = input._local.view_as(input._local)
    else:
        due = strides_in_order(meta.local_shape, memory_order(meta.shape, meta.stride()))
        unit, unit_dim = _unit(meta.shape, meta.stride(), cut)
        steps = [
            due[dim] if dim in cut
            else step // unit * due[unit_dim] if unit and step >= unit else step
            for dim, step in enumerate(stride)
        ]
        lengths = new.local_shape_at(meta.mesh.here)
        local = input._local.as_strided(lengths, steps, storage_offset)
    strides = None if stride == contiguous_strides(size) else stride
    return local_to_sharded(local, meta.mesh, new, strides, meta.alias)


def _wrong(
    tensor: ShardTensor, size: Ints, stride: Ints, offset: int | None, cut: Sequence[int]
) -> str:
    """Why a rank's block does not contain what is requested, if so: all ranks find the same."""
    meta = tensor._meta
    if offset is not None and (cut or type(tensor._local) is Moved):
        return f"storage_offset={offset} counts from where the memory of all ranks would begin"
    if not is_dense(meta):
        return "the tensor has gaps, which a block may not have"
    return _outside(meta.shape, meta.stride(), size, stride, cut)


def _windows(
    shape: Ints, strides: Ints, size: Ints, stride: Ints
) -> tuple[int, int, int, int] | None:
    """The first and last of the dims that are one line of memory and read in windows, where no
    other dim changes, and the windows' length and step."""
    for first, last in itertools.product(range(len(shape)), repeat=2):
        line, unit = math.prod(shape[first : last + 1]), strides[last]
        if first > last or first + 2 > len(size) or strides[first : last + 1] != tuple(
            [math.prod(shape[dim + 1 : last + 1]) * unit for dim in range(first, last + 1)]
        ):
            continue
        (count, length), step = size[first : first + 2], max(stride[first] // max(unit, 1), 1)
        if (
            (*size[:first], *size[first + 2 :]) == (*shape[:first], *shape[last + 1 :])
            and stride == (*strides[:first], step * unit, unit, *strides[last + 1 :])
            and count > 0 and length > 0 and (count - 1) * step + length <= line
        ):
            return first, last, length, step
    return None


def _unit(shape: Sequence[int], strides: Ints, cut: Sequence[int]) -> tuple[int, int]:
    """The least stride outside of all sharded dims, and its dim; 0 if there is none."""
    most = max((strides[dim] for dim in cut), default=0)
    outer = [
        (strides[dim], dim) for dim, length in enumerate(shape)
        if cut and dim not in cut and length > 1 and strides[dim] > most
    ]
    return min(outer, default=(0, 0))


def _outside(
    shape: Sequence[int], strides: Ints, size: Ints, stride: Ints, cut: Sequence[int]
) -> str:
    """The reason why elements of other ranks are requested; "" if none are."""
    for dim in cut:
        if dim >= len(size) or (size[dim], stride[dim]) != (shape[dim], strides[dim]):
            return f"dim {dim} is sharded, and does not stay as it is"
    if not cut or 0 in size:
        return ""
    least, (unit, _) = min(strides[dim] for dim in cut), _unit(shape, strides, cut)
    between = [
        dim for dim, length in enumerate(shape)
        if dim not in cut and length > 1 and strides[dim] > least and not strides[dim] >= unit > 0
    ]
    steps = [(length - 1, step) for dim, (length, step) in enumerate(zip(size, stride))
             if dim not in cut and length > 1]
    inner = sum(count * step for count, step in steps if step < least)
    outer = [(count, step) for count, step in steps if step >= least]
    reach = sum(count * step for count, step in outer)
    volume = math.prod([length for length, step in zip(shape, strides) if step >= unit])
    if between or inner >= least or any(not unit or step % unit for _, step in outer) or (
        unit and reach >= unit * volume
    ):
        return "it steps out of the dims that are not sharded"
    return ""


PAGE = page(op("as_strided", compose=_as_strided, each_call=True))
