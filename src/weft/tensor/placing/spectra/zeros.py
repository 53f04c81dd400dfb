"""Complex zeros, which remember the blocks that are written to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, fft

from weft.core import Box, Layout
from weft.planner.geometry import intersect
from weft.tensor.placing.spectra.calls import (
    BACKWARD,
    COMPLEX,
    OF_ONE_DIM,
    SHIFTS,
    TO_REAL,
    Fields,
    field_key,
    shifts_of,
    transformed_dims,
)
from weft.tensor.placing.spectra.dft import at_positions, check_move, one_by_one
from weft.tensor.placing.spectra.ranges import (
    Range,
    Ranges,
    box_of,
    count,
    merged,
    parts_of,
    place_among,
    rolled,
    spread,
)
from weft.tensor.placing.waiting import (
    LIKE,
    Placed,
    Unplaced,
    Wait,
    layout_of_write,
    like,
    set_item,
    unplaced,
)
from weft.tensor.shard_tensor import ShardTensor
from weft.transport.boxes import shape_of, slices

__all__ = ["Zeros", "waiting_for"]

_SUMS = (torch.add, torch.Tensor.add, torch.Tensor.add_)

Block = tuple[Box, ShardTensor]


class Zeros(Wait):
    """Complex zeros, and the blocks that have been written to them, none over another."""

    def __init__(self, make: Callable[[], Tensor] | None, fields: Fields) -> None:
        super().__init__(make, 0)
        self.fields = fields
        self.placed: Placed | None = None
        self.written: list[Block] = []

    @property
    def is_leaf(self) -> bool:
        return not any(value.requires_grad for _, value in self.written)

    @property
    def is_sharded(self) -> bool:
        return self.placed is not None

    def used(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is set_item and self.written_at(*args):
            return None
        if func in LIKE:
            return like(func, args, kwargs, lambda make, dtype: waiting_for(
                make, LIKE[func], dtype, self.fields))
        if self.written or func in _SUMS:
            if func in _SUMS and len(args) == 2 and not kwargs:
                return self._sum(func, *args)
            if func in SHIFTS:
                return self._shifted(args[0], shifts_of(func, args[0].shape, *args[1:], **kwargs))
            if func in BACKWARD or func in TO_REAL:
                return self._inverse(func, *args, **kwargs)
        return super().used(func, args, kwargs)

    def made(self, dtype: torch.dtype, placed: Placed | None) -> Tensor:
        out = super().made(dtype, self.placed or placed)
        with torch.enable_grad():
            for box, value in self.written:
                out[slices(box)] = value
        return out

    def written_at(self, target: Any, index: Any, value: Any) -> bool:
        """Whether a value is one of few sharded ones, and is kept as a block."""
        box = box_of(target.shape, index)
        if box is None or type(value) is not ShardTensor or 2 * value.numel() > target.numel() or (
            tuple(value.shape) != shape_of(box)
        ):
            return False
        placed = layout_of_write(target, index, [value])
        return placed is not None and self._add(placed, [(box, value.to(target.dtype, copy=True))])

    def _add(self, placed: Placed | None, blocks: Sequence[Block]) -> bool:
        """Keep blocks, unless they lie over others or on another mesh."""
        if placed is not None and self.placed is not None and placed[0] is not self.placed[0]:
            return False
        if any(intersect(one, other) for one, _ in blocks for other, _ in self.written):
            return False
        self.placed = self.placed or placed
        self.written += blocks
        return True

    def _like(self, target: Tensor, dtype: torch.dtype) -> tuple[Any, Zeros]:
        wait = Zeros(self.make, self.fields)
        wait.placed, wait.written = self.placed, _cast(self.written, dtype)
        return unplaced(wait, target.shape, dtype, target.device), wait

    def _sum(self, func: Any, target: Any, other: Any) -> Any:
        given = other._wait if type(other) is Unplaced else None
        if type(given) is not Zeros or other.shape != target.shape or (
            other.device != target.device or not (self.written or given.written)
        ):
            return NotImplemented
        out, wait = (target, self) if func is torch.Tensor.add_ else self._like(
            target, torch.promote_types(target.dtype, other.dtype))
        is_kept = wait._add(given.placed, _cast(given.written, out.dtype))
        return out if is_kept else NotImplemented

    def _shifted(self, target: Tensor, shifts: Mapping[int, int]) -> Tensor:
        out, wait = self._like(target, target.dtype)
        for dim, shift in shifts.items():
            wait.written = [
                ((*box[:dim], ends, *box[dim + 1 :]), part)
                for box, value in wait.written
                for ends, part in parts_of(value, dim, rolled(box[dim], shift, target.shape[dim]))]
        return out

    def _inverse(
        self, func: Any, target: Tensor, s: Any = None, dim: Any = None, norm: str | None = None,
        out: Any = None, n: Any = None,
    ) -> Any:
        """The inverse transform of the blocks."""
        if func in OF_ONE_DIM and (s is not None or n is not None):
            s = [n if s is None else s]
        dims, shape = transformed_dims(func, target.dim(), s, dim), target.shape
        if dims is None or out is not None or -1 in (s or ()):
            return NotImplemented
        real = dims[-1] if func in TO_REAL else None
        lengths = {at: 2 * (shape[at] - 1) if at == real else shape[at] for at in dims}
        lengths.update(zip(dims, s or ()))
        kept = {at: merged([box[at] for box, _ in self.written]) for at in dims}
        if any(lengths[at] != shape[at] for at in dims if at != real) or (
            real is not None and kept[real][-1][1] > lengths[real] // 2 + 1
        ):
            return NotImplemented
        few = [count(kept[at]) if at in kept else length for at, length in enumerate(shape)]
        if 2 * prod(few) > prod(shape):
            return NotImplemented
        with torch.enable_grad():
            x = self._among(kept, few, target)
            to = self._field(x, [lengths.get(at, length) for at, length in enumerate(shape)], kept)
            if to is not None:
                return _by_products(x, to, dims, kept, real, norm)
            others = sorted([at for at in dims if at != real],
                            key=lambda at: not x._meta.layout.dims[at])
            order = others if real is None else [real, *others]
            return one_by_one(x, order, (), lambda x, at: _of_whole(
                x, at, kept[at], lengths[at], norm, at == real))

    def _field(self, x: ShardTensor, shape: Sequence[int], kept: Ranges) -> Layout | None:
        """The layout of values of this shape where the dims of modes are sharded as those of the
        field that was transformed; None if none was, or an exchange of lines, which may lead to
        another layout, moves less than half."""
        near, own = self.fields.get(field_key(x._meta.mesh, [*kept], shape)), x._meta.layout
        if near is None or own.is_partial or x.dtype not in COMPLEX:
            return None
        offset = near.ndim - len(shape)
        dims, cuts = list(own.dims), list(own.cuts)
        for at in kept:
            dims[at], cuts[at] = near.dims[at + offset], near.cuts[at + offset]
        used = {axis for at in kept for axis in dims[at]}
        for at in range(len(shape)):
            if at not in kept and used & {*dims[at]}:
                dims[at], cuts[at] = tuple([axis for axis in dims[at] if axis not in used]), None
        to = Layout.make(own.mesh, tuple(shape), dims, cuts)
        are_few = all(count(ranges) * to.num_shards(at) <= 2 * shape[at]
                      for at, ranges in kept.items() if to.dims[at])
        return to if used and are_few else None

    def _among(self, kept: Ranges, shape: Sequence[int], target: Tensor) -> Any:
        """A tensor of this shape: the blocks, with only those elements of dims that are kept."""
        out: Any = unplaced(
            Wait(partial(torch.zeros, shape, dtype=target.dtype, device=target.device), 0), shape,
            target.dtype, target.device)
        for box, value in self.written:
            if value.shape == out.shape:
                return value
            out[slices(tuple([
                place_among(ends, kept[at]) if at in kept else ends
                for at, ends in enumerate(box)]))] = value
        return out


def waiting_for(
    make: Callable[[], Tensor], number: Any, dtype: torch.dtype, fields: Fields
) -> Wait:
    """How a tensor that is full of a number waits; `make` makes it plain."""
    return Zeros(make, fields) if dtype.is_complex and number == 0 else Wait(make, number)


def _by_products(
    x: Any, to: Layout, dims: Sequence[int], kept: Ranges, real: int | None, norm: str | None
) -> Any:
    """The values of modes where a layout has them: each rank gets all modes that it needs."""
    gathered = to.gathered(dims)
    gathered = gathered.resized(tuple(x.shape), gathered.cuts)
    axes = {axis for dim in dims for axis in to.dims[dim]}
    partial = ["sum" if axis in axes else None for axis in range(len(gathered.partial))]
    check_move(x, gathered)
    x = x.redistribute(  # each rank's positions give a part of the modes' gradient
        x._meta.mesh, gathered, grad_placements=gathered.replace(partial=tuple(partial)))
    for dim in sorted(dims, key=lambda dim: (dim == real, not to.dims[dim])):
        if to.dims[dim]:
            x = at_positions(x, dim, kept[dim], to, norm, dim == real)
        else:
            x = _of_whole(x, dim, kept[dim], to.shape[dim], norm, dim == real)
    return x


def _of_whole(
    x: Any, dim: int, kept: Sequence[Range], length: int, norm: str | None, is_half: bool
) -> Any:
    """The inverse transform of one dim, which is whole."""
    inverse = fft.irfft if is_half else fft.ifft
    return inverse(spread(x, dim, kept), n=length, dim=dim, norm=norm)


def _cast(blocks: Sequence[Block], dtype: torch.dtype) -> list[Block]:
    return [(box, value.to(dtype)) for box, value in blocks]
