"""Selections by masks: results whose size depends on the data.

The mask gets the layout of the tensor, sharded in its first dim alone, or in as many leading dims,
joined, as have an element for each shard. Each rank selects from its own block, and the selected
blocks are the result, ragged. Only counts are exchanged, eight bytes a rank; and where the tensor
is sharded otherwise, bits of the mask and what is selected (`mask_routes`). They are no part of a
recipe, because the next mask may select other numbers of elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.core.cuts import cuts_from_sizes
from weft.ops.indexing.row_exchange import Routes
from weft.ops.indexing.rows import as_rows, to_place
from weft.ops.places import apart
from weft.ops.sorting.unsigned import SIGNED
from weft.ops.writes import check_values
from weft.rules import op, page
from weft.tensor import modes
from weft.tensor.call import outside
from weft.tensor.call.dispatch import mesh_of
from weft.tensor.families.mask_routes import routes
from weft.tensor.families.packed_bools import can_send_packed, send_packed
from weft.tensor.meta import contiguous_strides
from weft.tensor.placing.layouts import layout_of, local_to_sharded
from weft.tensor.placing.operands import entered
from weft.tensor.placing.transitions import transition_between
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.capture import meta_like
from weft.tensor.trace.trees import local_of
from weft.transport import Shards, traffic

__all__ = ["PAGE", "put", "select"]

_WHY = "a mask is sharded in its first dim alone, as the tensor is"


@dataclass(frozen=True, slots=True)
class _Aligned:
    """A tensor and a mask over `num` of its dims, from `first` on, in equal layouts.

    Args:
        block, mask: this rank's parts. layout: of the tensor. axes: which cut the mask's first dim.
        held: where the tensor is sharded otherwise, and stays so: the layout of `block`, and the
            part of the mask there.
    """

    mesh: BoundMesh
    block: Tensor
    mask: Tensor
    layout: Layout
    axes: tuple[int, ...]
    first: int
    held: tuple[Layout, Tensor] | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims that the mask stands for."""
        return tuple(range(self.first, self.first + self.mask.dim()))

    def cuts(self, name: str, count: int | None = None) -> tuple[int, ...]:
        """Where what the shards of the mask select is cut; `count`: mine, where that is known."""
        if count is None:  # of a mask without data as many as `nonzero` finds there
            count = len(self.mask[self.mask]) if self.mask.is_meta else int(self.mask.sum())
        if not self.axes:
            return 0, count
        mine = torch.tensor(count, device=self.mesh.device)
        with traffic.label(name, "its size depends on the data"):
            shards = Shards(self.mesh, self.layout, (self.first,))
            (found,) = shards.gather(mine)
        row = math.prod(self.mask.shape[1:])  # in a dry run others have as many as I, or all
        return cuts_from_sizes(
            [min(each, size * row) for each, size in zip(found.tolist(), shards.sizes)])

    def line(self, cuts: tuple[int, ...]) -> Layout:
        """What is selected, one dim, sharded where the mask was."""
        return Layout.make(
            self.mesh, cuts[-1:], (self.axes,), (cuts if self.axes else None,)
        )

    def selected(self, cuts: tuple[int, ...]) -> Layout:
        """The tensor with what is selected in place of the dims that the mask stands for."""
        behind = range(self.first + self.mask.dim(), self.layout.ndim)
        return self.layout.take([*range(self.first), *behind]).insert(self.first, self.line(cuts))

    def local(self, name: str) -> Tensor:
        """This rank's part of what is selected."""
        if self.held is None:
            return self.block[(*[slice(None)] * self.first, self.mask)]
        dtype = self.block.dtype
        rows, _ = as_rows(self.block, self.dims)
        with traffic.label(name, _WHY):
            found = self._routes(name, self.held, True).fetch(
                rows.view(SIGNED[dtype]) if dtype in SIGNED else rows)
        found = to_place(found, 1, self.first)
        return found.view(dtype) if dtype in SIGNED else found

    def written(self, name: str, values: Tensor) -> ShardTensor:
        """The tensor with this rank's values for what is selected."""
        if self.held is None:
            out = torch.ops.aten.index_put(
                self.block, [*[None] * self.first, self.mask], values)
            return local_to_sharded(out, self.mesh, self.layout)
        with traffic.label(name, _WHY):
            places, values = self._routes(name, self.held, False).deliver(
                values.movedim(self.first, 0))
        rows, rest = as_rows(self.block, self.dims)
        out = rows.index_put((places,), values).view(*self.held[1].shape, *rest)
        return local_to_sharded(
            out.movedim(tuple(range(self.mask.dim())), self.dims), self.mesh, self.held[0])

    def _routes(self, name: str, held: tuple[Layout, Tensor], once: bool) -> Routes:
        layout, mine = held
        return routes(
            self.mesh, name, self.axes, (layout.take(self.dims), mine),
            (self.layout.take(self.dims), self.mask), once)


def _aligned(
    name: str, x: Tensor, mask: Tensor, first: int = 0, reduced: bool = False
) -> _Aligned:
    """`x` and `mask`, over its dims from `first` on, moved to equal layouts; with as many of these
    joined as it takes.

    `reduced`: partial values of a sum are added first.
    """
    joined = _joined(x, mask, first)
    if joined > 1:
        alike, x = x is mask, x.flatten(first, first + joined - 1)
        mask = x if alike else mask.flatten(0, joined - 1)
    mesh = mesh_of(name, [one._meta for one in (x, mask) if type(one) is ShardTensor])
    if mesh.here is None:
        outside.unknown(mesh, "the size of the result depends on the data")(name, (), {})
    of_x, of_mask = layout_of(x, mesh), layout_of(mask, mesh)
    if reduced:
        of_x = of_x.without_partial()
    over = range(first, first + mask.dim())
    axes = tuple(axis for dim in over for axis in of_x.dims[dim])
    cuts = of_x.cuts[first] if axes == of_x.dims[first] else None
    if not axes:  # x is cut here as the mask is: that moves nothing
        others = {axis for axis in range(mesh.ndim) if of_x.on(axis) is not None}
        axes = tuple(a for each in of_mask.dims for a in each if a not in others)
        cuts = of_mask.cuts[0] if axes == of_mask.dims[0] else None
    alike = _by_first(of_x, mask.shape, axes, cuts)
    target = of_x.take([dim for dim in range(x.dim()) if dim not in over]).insert(first, alike)
    if x is mask:
        block = _moved(name, mesh, x, target)
        return _Aligned(mesh, block, block, target, axes, first)
    move = transition_between(mesh, of_x.without_partial(), target.without_partial())
    if move is not None and move.communicates and not local_of(mask).is_meta:
        modes.check_strict(name, move)
        (block,) = entered(name, mesh, (x,), (of_x,), _WHY)
        mine, there = (
            _moved(name, mesh, mask, to) for to in (alike, of_x.without_partial().take(over)))
        return _Aligned(mesh, block, mine, target, axes, first, (of_x, there))
    if not can_send_packed(of_mask, alike):
        block, mine = entered(name, mesh, (x, mask), (target, alike), _WHY)
    else:
        (block,), mine = entered(name, mesh, (x,), (target,), _WHY), _moved(name, mesh, mask, alike)
    return _Aligned(mesh, block, mine, target, axes, first)


def _by_first(
    x: Layout, shape: Sequence[int], axes: tuple[int, ...], cuts: tuple[int, ...] | None
) -> Layout:
    """Of a mask on the mesh of x: sharded in its first dim alone."""
    rest = len(shape) - 1
    return Layout.make(x.mesh, shape, [axes, *[()] * rest], [cuts, *[None] * rest])


def _joined(x: Tensor, mask: Tensor, first: int) -> int:
    """How many leading dims of the mask are joined to be sharded: the first alone, if it has an
    element for each shard; else as many as have several, to be cut about evenly."""
    num = 1
    for one, dims in ((mask, range(mask.dim())), (x, range(first, first + mask.dim()))):
        if type(one) is ShardTensor:
            layout = one._meta.layout
            axes = [axis for dim in dims for axis in layout.dims[dim]]
            num = max(num, math.prod([layout.mesh.axis_sizes[axis] for axis in axes]))
    if not mask.numel() or mask.shape[0] >= num:
        return 1
    return next((count for count in range(2, mask.dim())
                 if math.prod(mask.shape[:count]) >= 4 * num), mask.dim())


def _moved(name: str, mesh: BoundMesh, mask: Tensor, to: Layout) -> Tensor:
    """The local part of a mask in this layout, of its bits where blocks are exchanged."""
    own = layout_of(mask, mesh)
    move = transition_between(mesh, own, to)
    if mask.dtype is not torch.bool or move is None or not can_send_packed(own, to):
        return entered(name, mesh, (mask,), (to,), _WHY)[0]
    modes.check_strict(name, move)
    with traffic.label(name, _WHY):
        return send_packed(mesh, name, local_of(mask), own, to)


def select(x: Tensor, mask: Tensor, first: int = 0, name: str = "__getitem__") -> ShardTensor:
    """`x[:, mask]`, with `first` dims in front: those elements for which the mask is true.

    Raises:
        IndexError: a mask of another shape than the dims that it stands for.
    """
    check_shape(x, mask, first)
    both = _aligned(name, x, mask, first)
    local = both.local(name)
    cuts = both.cuts(name, local.shape[first])
    strides = _strides(x, mask.dim(), first, cuts[-1])
    return local_to_sharded(local, both.mesh, both.selected(cuts), strides)


def _strides(x: Tensor, num: int, first: int, count: int) -> tuple[int, ...] | None:
    """Those that torch gives what `count` places in `num` dims of x, from `first` on, select."""
    if x.is_contiguous():
        return None
    places = torch.empty(count, dtype=torch.int64, device="meta")
    like = meta_like(x)[(*[slice(None)] * first, *[places] * num)]
    return None if like.stride() == contiguous_strides(like.shape) else like.stride()


def check_shape(x: Tensor, mask: Tensor, first: int) -> None:
    """Raise torch's IndexError of a mask that does not fit."""
    if tuple(mask.shape) != tuple(x.shape[first : first + mask.dim()]):
        at = next((
            dim for dim, length in enumerate(mask.shape)
            if first + dim >= x.dim() or x.shape[first + dim] != length
        ))
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} at index {at} does not match the shape of "
            f"the indexed tensor {list(x.shape)} at index {first + at}"
        )


def _masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """Each rank selects from its own block: what all have is the result, ragged."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"masked_select: expected BoolTensor for mask, got {mask.dtype}")
    if not shape:
        return _masked_select(input.reshape(1), mask.reshape(1))
    mask = _beside(mask, input, shape).expand(shape)
    # An operand that broadcasts becomes what the mask has of it: expanded by itself it would be cut
    # anew, and its gradient gathered.
    x = input if input.shape == shape else input.masked_fill(mask.logical_not(), 0)
    return select(x, mask, 0, "masked_select")


def _beside(mask: Tensor, x: Tensor, shape: Sequence[int]) -> Tensor:
    """A mask that broadcasts, moved to where x has the first dim: it grows before it is used."""
    mesh = mesh_of("masked_select", [o._meta for o in (x, mask) if type(o) is ShardTensor])
    of_x, own = layout_of(x, mesh), layout_of(mask, mesh)
    axes = tuple(axis for each in of_x.dims for axis in each)
    if mask.shape == shape or not axes or x.shape[0] != shape[0] or x.dim() < len(shape) or (
        own.is_replicated or mesh.here is None
    ):
        return mask
    lies = _by_first(of_x, shape, axes, of_x.cuts[0] if axes == of_x.dims[0] else None)
    to = lies.fitted(own.shape)
    (local,) = entered("masked_select", mesh, (mask,), (to,), _WHY)
    return local_to_sharded(local, mesh, to)


def nonzero(input: Tensor, *, as_tuple: bool = False) -> Any:
    """Where elements are not zero, row by row; or one tensor of places for each dim."""
    if not input.dim():
        return nonzero(input.reshape(1), as_tuple=True) if as_tuple else (
            nonzero(input.reshape(1))[:, :0]
        )
    mask = input if input.dtype is torch.bool else input != 0
    both = _aligned("nonzero", mask, mask, reduced=True)
    assert both.mesh.here is not None
    found = both.mask.nonzero()
    start, _ = both.layout.box_at(both.mesh.here)[0]
    if start:
        found[:, 0] += start
    joined = input.dim() + 1 - found.shape[1]
    if joined > 1:
        first, *rest = found.unbind(1)
        found = torch.stack([*apart(first, input.shape[:joined]), *rest]).t()
    cuts = both.cuts("nonzero", len(found))
    line = both.line(cuts)
    if not as_tuple:
        layout = line.insert(1, Layout.replicated(line.mesh, (input.dim(),)))
        return local_to_sharded(found, both.mesh, layout, (1, max(cuts[-1], 1)))
    return tuple([local_to_sharded(each, both.mesh, line) for each in found.unbind(1)])


def _nonzero_static(input: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """The first `size` of what `nonzero` finds, and `fill_value` where it finds less."""
    if size < 0:
        raise RuntimeError("nonzero_static: 'size' must be an non-negative integer")
    found = nonzero(input)[:size]
    more = size - found.shape[0]
    if more:
        found = torch.constant_pad_nd(found, [0, 0, 0, more], fill_value)
    return found.contiguous()


def _places(input: Tensor) -> Any:
    """The places of what is not zero, one tensor for each dim: each rank has those of its block."""
    return nonzero(input, as_tuple=True)


def _masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Where the mask is true, the elements of `source` in order: each rank gets its own."""
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"masked_scatter_ only supports boolean masks, but got {mask.dtype}")
    if input.dtype is not source.dtype:
        raise RuntimeError("masked_scatter: expected self and source to have same dtypes but got "
                           f"{input.dtype} and {source.dtype}")
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    if not shape:
        return _masked_scatter(input.reshape(1), mask.reshape(1), source).reshape(())
    input, mask = input.expand(shape), mask.expand(shape)
    both = _aligned("masked_scatter", input, mask, reduced=True)
    cuts = both.cuts("masked_scatter")
    if source.numel() < cuts[-1]:
        raise RuntimeError("Number of elements of source < number of ones in mask")
    given = source.reshape(-1)[: cuts[-1]]
    (mine,) = entered("masked_scatter", both.mesh, (given,), (both.line(cuts),), _WHY)
    if both.held is not None:
        return both.written("masked_scatter", mine).reshape(shape)
    out = both.block.masked_scatter(both.mask, mine)  # contiguous, unlike the block perhaps
    return local_to_sharded(out, both.mesh, both.layout).reshape(shape)


def put(x: ShardTensor, mask: Tensor, first: int, value: Tensor) -> None:
    """`x[:, mask] = value`, with `first` dims in front, in place.

    Raises:
        IndexError: a mask of another shape. RuntimeError: a value that does not broadcast to what
            the mask selects.
    """
    check_shape(x, mask, first)
    num = mask.dim()
    behind = x.dim() - first - num
    lead = value.dim() - (first + 1 + behind)
    if lead > 0:  # leading dims of size 1 fall away, as in torch
        value = value.reshape(value.shape[lead:])
    place = value.dim() - 1 - behind
    spread = mask.reshape(*mask.shape, *(1,) * behind)
    if value.numel() == 1:
        x.masked_fill_(spread, value.reshape(()))
        return
    if x.dtype is not value.dtype:
        raise RuntimeError("Index put requires the source and destination dtypes match, got "
                           f"{x.dtype} for the destination and {value.dtype} for the source.")
    if place < 0 or value.shape[place] == 1:  # the same for every element that is selected
        if place >= 0:
            value = value.reshape(*value.shape[:place], *(1,) * num, *value.shape[place + 1 :])
        x.copy_(torch.where(spread, value, x))
        return
    both = _aligned("__setitem__", x, mask, first, reduced=True)
    result = both.selected(both.cuts("__setitem__"))
    check_values(value.shape, result.shape)
    value = value.expand(result.shape)
    (mine,) = entered("__setitem__", both.mesh, (value,), (result,), _WHY)
    x.copy_(both.written("__setitem__", mine).reshape(x.shape))


PAGE = page(
    op("masked_select", compose=_masked_select, each_call=True),
    op("nonzero argwhere", compose=nonzero, each_call=True),
    op("nonzero_numpy where.default", compose=_places, each_call=True),
    op("nonzero_static", compose=_nonzero_static, each_call=True),
    op("masked_scatter", compose=_masked_scatter, each_call=True),
)
