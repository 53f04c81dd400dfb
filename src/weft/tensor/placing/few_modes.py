"""Fourier layers inside `weft.sharded_factories()`: modes that nobody reads or writes stay home.

`rfftn` of a field with whole and sharded dims transforms the whole ones, and exchanges for the
sharded ones. The exchange waits for slices, which say which modes of the whole dims are read. A
tensor of complex zeros waits, too, and remembers the blocks that are written to it: an inverse
transform exchanges these, and adds the zeros where a dim is whole. Any other use makes the whole
spectrum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, fft
from torch.nn.functional import pad as pad_function

from weft.core import Layout
from weft.errors import UnsupportedOpError
from weft.ops.transforms import handed_over
from weft.tensor.modes import check_strict
from weft.tensor.placing.redistribute import redistribute_to
from weft.tensor.placing.transitions import transition_between
from weft.tensor.placing.waiting import (
    Placed,
    Unplaced,
    Wait,
    become,
    get_item,
    items_of,
    layout_of_write,
    set_item,
    unplaced,
)
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.capture import unwatched

__all__ = ["Zeros", "begun"]

Range = tuple[int, int]
Ranges = Mapping[int, Sequence[Range]]
"""Of some dims, the elements that are kept, in their order."""

Block = tuple[list[Range], ShardTensor]

_FORWARD: dict[Any, Any] = {
    fft.fft2: fft.fftn, fft.fftn: fft.fftn, fft.rfft2: fft.rfftn, fft.rfftn: fft.rfftn}
_BACKWARD: dict[Any, Any] = {
    fft.ifft2: fft.ifft, fft.ifftn: fft.ifft, fft.irfft2: fft.irfft, fft.irfftn: fft.irfft}
_OF_TWO_DIMS = (fft.fft2, fft.rfft2, fft.ifft2, fft.irfft2)
_SHIFTS = (fft.fftshift, fft.ifftshift)
_SUMS = (torch.add, torch.Tensor.add, torch.Tensor.add_)
_ZEROS_LIKE = (torch.zeros_like, torch.Tensor.new_zeros)


_MOST = 8
"""Of so many boxes the modes are exchanged each by itself, those of all others together."""


def begun(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """What waits in place of the result of a call on a ShardTensor; None where nothing does."""
    if func in _FORWARD:
        return _spectrum(func, *args, **kwargs)
    if func is pad_function and args[0].is_complex():
        return _padded(*args, **kwargs)
    return None


def _spectrum(
    func: Any, input: ShardTensor, s: Any = None, dim: Any = None, norm: str | None = None,
    out: Any = None,
) -> Tensor | None:
    dims = _transformed(func, input.ndim, s, dim)
    if s is not None or out is not None or dims is None or 0 in input.shape:
        return None
    layout, function = input._meta.layout, _FORWARD[func]
    real = dims[-1] if function is fft.rfftn else None
    first = [at for at in dims if not layout.dims[at] or at == real]
    rest = [at for at in dims if at not in first]
    if not first or not rest:
        return None
    base = function(input, dim=first, norm=norm)
    return unplaced(_Spectrum(base, first, rest, norm), base.shape, base.dtype, base.device)


def _padded(
    input: ShardTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor | None:
    """Zeros with one block."""
    if mode != "constant" or value or min(pad, default=-1) < 0 or not (
        len(pad) % 2 == 0 and len(pad) <= 2 * input.ndim
    ):
        return None
    before = [0] * (input.ndim - len(pad) // 2) + list(pad[-2::-2])
    after = [0] * (input.ndim - len(pad) // 2) + list(pad[:: -2])
    index = tuple([slice(start, start + length) for start, length in zip(before, input.shape)])
    shape = [sum(each) for each in zip(before, input.shape, after)]
    wait = Zeros(partial(torch.constant_pad_nd, input, pad))
    out = unplaced(wait, shape, input.dtype, input.device)
    return out if wait.written_at(out, index, input) else None


def _transformed(func: Any, ndim: int, s: Any, dim: Any) -> list[int] | None:
    """The dims that a function of torch.fft transforms; None of a call that it refuses."""
    if dim is None:
        dim = (-2, -1) if func in _OF_TWO_DIMS else range(-(ndim if s is None else len(s)), 0)
    if not all(-ndim <= at < ndim for at in dim) or (s is not None and len(s) != len(dim)):
        return None
    dims = [at % ndim for at in dim]
    return dims if dims and len({*dims}) == len(dims) else None


def _shifts_of(func: Any, shape: Sequence[int], dim: Any = None) -> dict[int, int]:
    """How far fftshift or ifftshift rolls each dim."""
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    return {at % len(shape): shape[at] // 2 if func is fft.fftshift else -(shape[at] // 2)
            for at in dims}


def _box(shape: Sequence[int], index: Any) -> list[Range] | None:
    """What `x[index]` reads of each dim; None if it is no box, or an empty one."""
    items = items_of(shape, index)
    if items is None:
        return None
    box: list[Range] = []
    for item, length in zip(items, shape):
        start, stop, step = item.indices(length) if isinstance(item, slice) else (
            item % length, item % length + 1, 1)
        if step != 1 or start >= stop:
            return None
        box.append((start, stop))
    return box


def _rolled(ends: Range, shift: int, length: int) -> list[Range]:
    """Where the elements of a range come to lie when their dim is rolled, in their order."""
    start = (ends[0] + shift) % length
    stop = start + ends[1] - ends[0]
    return [(start, stop)] if stop <= length else [(start, length), (0, stop - length)]


def _taken(x: Tensor, kept: Ranges) -> Any:
    for dim, ranges in kept.items():
        if sum(stop - start for start, stop in ranges) < x.shape[dim] or len(ranges) > 1:
            parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
            x = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return x


def _one_by_one(
    x: Any, dims: Sequence[int], done: Sequence[int], transform: Callable[[Any, int], Any]
) -> Any:
    """Transform these dims, the last one first, after others. The axes of a sharded dim go where a
    transform of all of them would bring them."""
    done, pending = list(done), list(dims)
    while pending:
        dim = pending.pop()
        layout = x._meta.layout
        if layout.dims[dim]:
            x = _handed(x, handed_over(layout, dim, done, pending))
        x = transform(x, dim)
        done.append(dim)
    return x


def _handed(x: ShardTensor, layout: Layout) -> ShardTensor:
    move = transition_between(x._meta.mesh, x._meta.layout, layout, order=x._meta.order())
    if move is not None:
        check_strict("rfftn", move)
    return redistribute_to(x, layout, "rfftn")


class _Spectrum(Wait):
    """The spectrum of a field, of which some dims are still to be transformed.

    Args:
        base: the field, in which the dims `first` have been transformed.
        rest: the dims that have not, all of them sharded.
        norm: as torch's transforms take it.
        shifts: how far dims are rolled afterwards.
    """

    def __init__(
        self, base: ShardTensor, first: Sequence[int], rest: Sequence[int], norm: str | None,
        shifts: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(lambda: self._of({}))
        self.base, self.first, self.rest, self.norm = base, first, rest, norm
        self.shifts = shifts or {}
        self.read: dict[str, tuple[ShardTensor, int]] = {}
        """The spectra that slices are of, by their modes of whole dims, and their versions."""

    @property
    def is_leaf(self) -> bool:
        return not self.base.requires_grad

    def used(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is get_item:
            return self._slice(args[1])
        if func in _SHIFTS:
            return self._shifted(_shifts_of(func, self.base.shape, *args[1:], **kwargs))
        if func in _ZEROS_LIKE:
            return _zeros_of(func, args, kwargs)
        return NotImplemented

    def made(self, dtype: torch.dtype, placed: Placed | None) -> Tensor:
        self._check()
        out = self._of({})
        if self.shifts:
            out = out.roll([*self.shifts.values()], [*self.shifts])
        if self.read:
            out._refuse_gradient = _refuse_gradient
        return out

    def _of(self, kept: Ranges) -> ShardTensor:
        """The spectrum before it is rolled; of these dims, which are transformed, these modes."""
        with torch.enable_grad():
            return _one_by_one(
                _taken(self.base, kept), self.rest, self.first,
                lambda x, dim: fft.fft(x, dim=dim, norm=self.norm))

    def _slice(self, index: Any) -> Any:
        shape = self.base.shape
        box = _box(shape, index)
        if box is None:
            return NotImplemented
        ranges = {dim: _rolled(box[dim], -self.shifts.get(dim, 0), shape[dim])
                  for dim in (*self.first, *self.rest)}
        kept = {dim: ranges[dim] for dim in self.first if box[dim] != (0, shape[dim])}
        if not kept:
            return NotImplemented
        self._check()
        key = repr(kept)
        if key not in self.read:
            if len(self.read) == _MOST:
                return NotImplemented
            made = self._of(kept)
            self.read[key] = made, made._version
        out = _taken(self.read[key][0], {dim: ranges[dim] for dim in self.rest})
        items = [
            item if dim not in ranges else slice(None) if isinstance(item, slice) else 0
            for dim, item in enumerate(items_of(shape, index) or ())]
        return out[tuple(items)]

    def _shifted(self, shifts: Mapping[int, int]) -> Tensor:
        self._check()
        both = {dim: self.shifts.get(dim, 0) + shifts.get(dim, 0)
                for dim in {*self.shifts, *shifts}}
        wait = _Spectrum(self.base, self.first, self.rest, self.norm, both)
        return unplaced(wait, self.base.shape, self.base.dtype, self.base.device)

    def _check(self) -> None:
        if any(made._version != version for made, version in self.read.values()):
            raise UnsupportedOpError(
                "sharded_factories", "a slice of a spectrum has been written to, and then the "
                "spectrum was used again",
                "inside, a slice of a spectrum is transformed by itself: they share no memory",
                [str(made.sharding) for made, _ in self.read.values()],
                "write to spectrum[...].clone()")


def _refuse_gradient() -> NoReturn:
    raise UnsupportedOpError(
        "a spectrum's own gradient", "slices of it were read before inside of "
        "weft.sharded_factories()",
        "they were transformed by themselves: the gradient would lack theirs", [],
        "ask for it before the first slice (retain_grad, register_hook), or outside")


def _zeros_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What zeros_like and new_zeros of a spectrum make."""
    spectrum, *rest = args
    if not kwargs.keys() <= {"dtype", "device"}:
        return NotImplemented
    with unwatched():
        empty = torch.empty(spectrum.shape, dtype=spectrum.dtype, device="meta")
        like = func(empty, *rest, **{**kwargs, "device": "meta"})

    def make() -> Tensor:
        become(spectrum, None)
        return func(spectrum, *rest, **kwargs)

    device = torch.device(kwargs.get("device") or spectrum.device)
    return unplaced(Zeros(make) if like.is_complex() else Wait(make, 0), like.shape, like.dtype,
                    device)


class Zeros(Wait):
    """Complex zeros, and the blocks that have been written to them, none over another."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__(make, 0)
        self.placed: Placed | None = None
        self.written: list[Block] = []

    @property
    def is_leaf(self) -> bool:
        return not any(value.requires_grad for _, value in self.written)

    def used(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is set_item and self.written_at(*args):
            return None
        if self.written or func in _SUMS:
            if func in _SUMS and len(args) == 2 and not kwargs:
                return self._sum(func, *args)
            if func in _SHIFTS:
                return self._shifted(args[0], _shifts_of(func, args[0].shape, *args[1:], **kwargs))
            if func in _BACKWARD:
                return self._inverse(func, *args, **kwargs)
        return super().used(func, args, kwargs)

    def made(self, dtype: torch.dtype, placed: Placed | None) -> Tensor:
        out = super().made(dtype, self.placed or placed)
        with torch.enable_grad():
            for box, value in self.written:
                out[_index(box)] = value
        return out

    def written_at(self, target: Any, index: Any, value: Any) -> bool:
        """Whether a value is one of few sharded ones, and is kept as a block."""
        box = _box(target.shape, index)
        if box is None or type(value) is not ShardTensor or 2 * value.numel() > target.numel() or (
            list(value.shape) != [stop - start for start, stop in box]
        ):
            return False
        placed = layout_of_write(target, index, [value])
        return placed is not None and self._add(placed, [(box, value.to(target.dtype, copy=True))])

    def _add(self, placed: Placed | None, blocks: Sequence[Block]) -> bool:
        """Keep blocks, unless they lie over others or on another mesh."""
        if placed is not None and self.placed is not None and placed[0] is not self.placed[0]:
            return False
        if any(_overlap(one, other) for one, _ in blocks for other, _ in self.written):
            return False
        self.placed = self.placed or placed
        self.written += blocks
        return True

    def _like(self, target: Tensor, dtype: torch.dtype) -> tuple[Any, Zeros]:
        wait = Zeros(self.make)
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
                ([*box[:dim], ends, *box[dim + 1 :]], part)
                for box, value in wait.written
                for ends, part in _parts(value, dim, _rolled(box[dim], shift, target.shape[dim]))]
        return out

    def _inverse(
        self, func: Any, target: Tensor, s: Any = None, dim: Any = None, norm: str | None = None,
        out: Any = None,
    ) -> Any:
        """The inverse transform of the blocks."""
        dims = _transformed(func, target.dim(), s, dim)
        if dims is None or out is not None or -1 in (s or ()):
            return NotImplemented
        one_dim, shape = _BACKWARD[func], target.shape
        real = dims[-1] if one_dim is fft.irfft else None
        lengths = {at: 2 * (shape[at] - 1) if at == real else shape[at] for at in dims}
        lengths.update(zip(dims, s or ()))
        kept = {at: _merged([box[at] for box, _ in self.written]) for at in dims}
        if any(lengths[at] != shape[at] for at in dims if at != real) or (
            real is not None and kept[real][-1][1] > lengths[real] // 2 + 1
        ):
            return NotImplemented
        few = [sum(stop - start for start, stop in kept[at]) if at in kept else length
               for at, length in enumerate(shape)]
        if 2 * prod(few) > prod(shape):
            return NotImplemented
        with torch.enable_grad():
            x = self._among(kept, few, target)
            others = sorted([at for at in dims if at != real],
                            key=lambda at: not x._meta.layout.dims[at])
            order = others if real is None else [real, *others]
            return _one_by_one(x, order, (), lambda x, at: (fft.irfft if at == real else fft.ifft)(
                _spread(x, at, kept[at]), n=lengths[at], dim=at, norm=norm))

    def _among(self, kept: Ranges, shape: Sequence[int], target: Tensor) -> Any:
        """A tensor of this shape: the blocks, with only those elements of dims that are kept."""
        out: Any = unplaced(
            Wait(partial(torch.zeros, shape, dtype=target.dtype, device=target.device), 0), shape,
            target.dtype, target.device)
        for box, value in self.written:
            if value.shape == out.shape:
                return value
            out[_index([_placed(ends, kept[at]) if at in kept else ends
                        for at, ends in enumerate(box)])] = value
        return out


def _cast(blocks: Sequence[Block], dtype: torch.dtype) -> list[Block]:
    return [(box, value.to(dtype)) for box, value in blocks]


def _index(box: Sequence[Range]) -> tuple[slice, ...]:
    return tuple([slice(*ends) for ends in box])


def _overlap(one: Sequence[Range], other: Sequence[Range]) -> bool:
    return all(start < end and begin < stop
               for (start, stop), (begin, end) in zip(one, other))


def _merged(ranges: Sequence[Range]) -> list[Range]:
    out: list[Range] = []
    for start, stop in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(stop, out[-1][1])
        else:
            out.append((start, stop))
    return out


def _placed(ends: Range, kept: Sequence[Range]) -> Range:
    """Where a range lies among the elements that are kept."""
    at = 0
    for start, stop in kept:
        if start <= ends[0] < stop:
            return at + ends[0] - start, at + ends[1] - start
        at += stop - start
    raise AssertionError(ends, kept)


def _parts(x: Any, dim: int, ranges: Sequence[Range]) -> list[tuple[Range, Any]]:
    """The parts of a tensor that these ranges are."""
    lengths = [stop - start for start, stop in ranges]
    return list(zip(ranges, x.split(lengths, dim) if len(ranges) > 1 else [x]))


def _spread(x: Any, dim: int, ranges: Sequence[Range]) -> Any:
    """The elements at their places, with zeros between them, but none behind."""
    parts: list[Any] = []
    end = 0
    for (start, stop), part in _parts(x, dim, ranges):
        if start > end:
            shape = [start - end if at == dim else length for at, length in enumerate(x.shape)]
            parts.append(x.new_zeros(shape))
        parts.append(part)
        end = stop
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
