"""Fourier layers inside `weft.sharded_factories()`: modes that nobody reads or writes stay home.

A transform of a field with sharded dims waits for slices, which say which modes are read. A dim is
transformed to few modes as a product (`few_waves`), whose sum over ranks is all that is sent. To
more modes than a rank has positions it is transformed by an exchange, after the modes of other dims
have been taken.

A tensor of complex zeros waits, too, and remembers the blocks that are written to it. An inverse
transform brings all ranks their modes, and each makes its own positions of them, where the field
that was transformed had them; or it exchanges the blocks, and adds the zeros where a dim is whole.

Any other use makes the whole spectrum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, fft
from torch.nn.functional import pad as pad_function

from weft.core import Layout
from weft.errors import UnsupportedOpError
from weft.ops.transforms import handed_over, spread_over
from weft.tensor.modes import check_strict
from weft.tensor.placing.few_waves import at_positions, modes_of, real_at_positions
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

__all__ = ["STARTS", "Fields", "Zeros", "begun"]

Range = tuple[int, int]
Ranges = Mapping[int, Sequence[Range]]
"""Of some dims, the elements that are kept, in their order."""

Block = tuple[list[Range], ShardTensor]

_FORWARD = (fft.fft, fft.fft2, fft.fftn)
_REAL = (fft.rfft, fft.rfft2, fft.rfftn)
_BACKWARD = (fft.ifft, fft.ifft2, fft.ifftn)
_TO_REAL = (fft.irfft, fft.irfft2, fft.irfftn)
_OF_ONE_DIM = (fft.fft, fft.rfft, fft.ifft, fft.irfft)
_OF_TWO_DIMS = (fft.fft2, fft.rfft2, fft.ifft2, fft.irfft2)
_FLOATS, _COMPLEX = (torch.float32, torch.float64), (torch.complex64, torch.complex128)
_SHIFTS = (fft.fftshift, fft.ifftshift)
_SUMS = (torch.add, torch.Tensor.add, torch.Tensor.add_)
_ZEROS_LIKE = (torch.zeros_like, torch.Tensor.new_zeros)


_MOST = 8
"""Of so many boxes the modes are exchanged each by itself, those of all others together."""


_EVEN = 1.5
"""As of `ops.transforms`, but of modes, which are few: where they are sharded by modes, an inverse
transform leads back to the layout of the field."""

Fields = dict[tuple[tuple[int, int], ...], Layout]
"""The layouts of fields that were transformed, by their transformed dims, counted from the last,
and lengths."""


STARTS = frozenset((*_FORWARD, *_REAL, pad_function))
"""Functions of which `begun` may put off a call."""


def begun(func: Any, args: Sequence[Any], kwargs: dict[str, Any], fields: Fields) -> Tensor | None:
    """What waits in place of the result of a call on a ShardTensor; None where nothing does."""
    if func is not pad_function:
        return _spectrum(func, fields, *args, **kwargs)
    return _padded(fields, *args, **kwargs) if args[0].is_complex() else None


def _spectrum(
    func: Any, fields: Fields, input: ShardTensor, s: Any = None, dim: Any = None,
    norm: str | None = None, out: Any = None, n: Any = None,
) -> Tensor | None:
    dims = _transformed(func, input.ndim, s, dim)
    if s is not None or n is not None or out is not None or dims is None or 0 in input.shape:
        return None
    layout = input._meta.layout
    first, rest = [at for at in dims if not layout.dims[at]], [at for at in dims if layout.dims[at]]
    if not rest or not {*layout.partial} <= {None, "sum"}:
        return None
    real = dims[-1] if func in _REAL else None
    if input.dtype not in (_FLOATS if real is not None else (*_FLOATS, *_COMPLEX)):
        return None
    fields[_key(dims, input.shape)] = layout
    if first and real not in rest:
        base = (fft.fftn if real is None else fft.rfftn)(input, dim=first, norm=norm)
    else:
        base, first = input.clone(), []
    return _Spectrum(base, dims, first, real, norm, fields).waiting()


def _padded(
    fields: Fields, input: ShardTensor, pad: Sequence[int], mode: str = "constant",
    value: float | None = None,
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
    wait = Zeros(partial(torch.constant_pad_nd, input, pad), fields)
    out = unplaced(wait, shape, input.dtype, input.device)
    return out if wait.written_at(out, index, input) else None


def _transformed(func: Any, ndim: int, s: Any, dim: Any) -> list[int] | None:
    """The dims that a function of torch.fft transforms; None of a call that it refuses."""
    if func in _OF_ONE_DIM:
        dim = [-1 if dim is None else dim]
    elif dim is None:
        dim = (-2, -1) if func in _OF_TWO_DIMS else range(-(ndim if s is None else len(s)), 0)
    if not all(isinstance(at, int) and -ndim <= at < ndim for at in dim) or (
        s is not None and len(s) != len(dim)
    ):
        return None
    dims = [at % ndim for at in dim]
    return dims if dims and len({*dims}) == len(dims) else None


def _key(dims: Sequence[int], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted([(dim - len(shape), shape[dim]) for dim in dims]))


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
        if _count(ranges) < x.shape[dim] or len(ranges) > 1:
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
            x = _handed(x, handed_over(layout, dim, done, pending, _EVEN))
        x = transform(x, dim)
        done.append(dim)
    return x


def _handed(x: ShardTensor, layout: Layout) -> ShardTensor:
    _check_strict(x, layout)
    return redistribute_to(x, layout, "rfftn")


def _check_strict(x: ShardTensor, layout: Layout) -> None:
    move = transition_between(x._meta.mesh, x._meta.layout, layout, order=x._meta.order())
    if move is not None:
        check_strict("rfftn", move)


class _Spectrum(Wait):
    """The spectrum of a field, of which some dims are still to be transformed.

    Args:
        base: the field, in which the dims `first`, which are whole, have been transformed.
        dims: all dims to be transformed, in the order of the call.
        real: the dim of which the spectrum has one half.
        norm: as torch's transforms take it.
        shifts: how far dims are rolled afterwards.
    """

    def __init__(
        self, base: ShardTensor, dims: Sequence[int], first: Sequence[int], real: int | None,
        norm: str | None, fields: Fields, shifts: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(None)
        self.base, self.dims, self.first, self.real = base, dims, first, real
        self.rest = [dim for dim in dims if dim not in first]
        self.norm, self.fields, self.shifts = norm, fields, shifts or {}
        self.shape = list(base.shape)
        if real in self.rest:
            self.shape[real] = base.shape[real] // 2 + 1
        self.read: dict[str, tuple[ShardTensor, int]] = {}
        """The spectra that slices are of, by the modes that they have, and their versions."""
        self.last: tuple[Any, str] = (None, "")
        """The last slice, and the modes that it has."""

    def waiting(self) -> Tensor:
        return unplaced(self, self.shape, self.base.dtype.to_complex(), self.base.device)

    @property
    def is_leaf(self) -> bool:
        return not self.base.requires_grad

    def used(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is get_item:
            return self._slice(args[1])
        if func is set_item:
            self._written(args[2])
        if func in _SHIFTS:
            return self._shifted(_shifts_of(func, self.shape, *args[1:], **kwargs))
        if func in _ZEROS_LIKE:
            return _zeros_of(func, args, kwargs, self.fields)
        return NotImplemented

    def made(self, dtype: torch.dtype, placed: Placed | None) -> Tensor:
        self._check()
        out = self._whole()
        if self.shifts:
            out = out.roll([*self.shifts.values()], [*self.shifts])
        if self.read:
            out._refuse_gradient = _refuse_gradient
        return out

    def _whole(self) -> Any:
        """All of the spectrum, before it is rolled."""
        with torch.enable_grad():
            if self.first:
                return self._exchanged(self.base, self.rest, self.first)
            function = fft.fftn if self.real is None else fft.rfftn
            return function(self.base, dim=self.dims, norm=self.norm)

    def _exchanged(self, x: Any, dims: Sequence[int], done: Sequence[int]) -> Any:
        return _one_by_one(
            x, dims, done, lambda x, dim: fft.fft(x, dim=dim, norm=self.norm))

    def _slice(self, index: Any) -> Any:
        box = _box(self.shape, index)
        if box is None:
            return NotImplemented
        ranges = {dim: _rolled(box[dim], -self.shifts.get(dim, 0), self.shape[dim])
                  for dim in self.dims}
        exchanged = self._exchanged_for(ranges)
        if exchanged is None:
            return NotImplemented
        self._check()
        kept = {dim: ranges[dim] for dim in self.dims if dim not in exchanged}
        key = repr(kept)
        if key not in self.read:
            if len(self.read) == _MOST:
                return NotImplemented
            with torch.enable_grad():
                made = self._of(kept, exchanged)
            self.read[key] = made, made._version
        out = _taken(self.read[key][0], {dim: ranges[dim] for dim in exchanged})
        items = [
            item if dim not in ranges else slice(None) if isinstance(item, slice) else 0
            for dim, item in enumerate(items_of(self.shape, index) or ())]
        out = out[tuple(items)]
        self.last = weakref.ref(out), key
        return out

    def _written(self, value: Any) -> None:
        """`x[...] *= 2` writes to a slice first, and then writes that to `x`."""
        last, key = self.last
        if last is not None and last() is value and value is not None:
            made, version = self.read[key]
            if made._version == version + 1:
                self.read[key] = made, made._version

    def _exchanged_for(self, ranges: Ranges) -> list[int] | None:
        """The sharded dims that are transformed by an exchange to have these modes; None if all of
        the spectrum is no more."""
        layout, lengths = self.base._meta.layout, self.base.shape
        parts = {dim: _count(ranges[dim]) / lengths[dim] for dim in self.dims}
        exchanged = [dim for dim in self.rest
                     if layout.dims[dim] and parts[dim] * layout.num_shards(dim) > 1]
        others = prod([parts[dim] for dim in self.dims if dim not in exchanged])
        # The real dim is exchanged as complex numbers, twice for modes of both signs.
        most = 0.25 if self.real in exchanged else 1.0
        return exchanged if others < most or not exchanged else None

    def _of(self, kept: Ranges, exchanged: Sequence[int]) -> Any:
        """The spectrum before it is rolled: these modes of some dims, all of the others."""
        out: Any = _taken(self.base, {dim: kept[dim] for dim in self.first})
        for dim in self.rest:
            if dim not in exchanged and not out._meta.layout.dims[dim] and (
                4 * _count(kept[dim]) > out.shape[dim]
            ):
                out = _taken(fft.fft(out, dim=dim, norm=self.norm), {dim: kept[dim]})
            elif dim not in exchanged:
                out = modes_of(out, dim, kept[dim], self.norm)
        return self._exchanged(_summed(out, [*kept], exchanged), exchanged, [*kept])

    def _shifted(self, shifts: Mapping[int, int]) -> Tensor:
        self._check()
        both = {dim: self.shifts.get(dim, 0) + shifts.get(dim, 0)
                for dim in {*self.shifts, *shifts}}
        return _Spectrum(self.base, self.dims, self.first, self.real, self.norm, self.fields,
                         both).waiting()

    def _check(self) -> None:
        if any(made._version != version for made, version in self.read.values()):
            raise UnsupportedOpError(
                "sharded_factories", "a slice of a spectrum has been written to, and then the "
                "spectrum was used again",
                "inside, a slice of a spectrum is transformed by itself: they share no memory",
                [str(made.sharding) for made, _ in self.read.values()],
                "write to spectrum[...].clone()")


def _count(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _summed(x: ShardTensor, done: Sequence[int], pending: Sequence[int]) -> ShardTensor:
    """The tensor with its partial values summed; the axes go to dims that they divide."""
    layout = x._meta.layout
    axes = [axis for axis, kind in enumerate(layout.partial) if kind is not None]
    if not axes:
        return x
    return _handed(x, spread_over(
        layout.without_partial(), axes, done, pending, _EVEN)[0])


def _refuse_gradient() -> NoReturn:
    raise UnsupportedOpError(
        "a spectrum's own gradient", "slices of it were read before inside of "
        "weft.sharded_factories()",
        "they were transformed by themselves: the gradient would lack theirs", [],
        "ask for it before the first slice (retain_grad, register_hook), or outside")


def _zeros_of(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], fields: Fields
) -> Any:
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
    wait = Zeros(make, fields) if like.is_complex() else Wait(make, 0)
    return unplaced(wait, like.shape, like.dtype, device)


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

    def used(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is set_item and self.written_at(*args):
            return None
        if self.written or func in _SUMS:
            if func in _SUMS and len(args) == 2 and not kwargs:
                return self._sum(func, *args)
            if func in _SHIFTS:
                return self._shifted(args[0], _shifts_of(func, args[0].shape, *args[1:], **kwargs))
            if func in _BACKWARD or func in _TO_REAL:
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
                ([*box[:dim], ends, *box[dim + 1 :]], part)
                for box, value in wait.written
                for ends, part in _parts(value, dim, _rolled(box[dim], shift, target.shape[dim]))]
        return out

    def _inverse(
        self, func: Any, target: Tensor, s: Any = None, dim: Any = None, norm: str | None = None,
        out: Any = None, n: Any = None,
    ) -> Any:
        """The inverse transform of the blocks."""
        if func in _OF_ONE_DIM and (s is not None or n is not None):
            s = [n if s is None else s]
        dims, shape = _transformed(func, target.dim(), s, dim), target.shape
        if dims is None or out is not None or -1 in (s or ()):
            return NotImplemented
        real = dims[-1] if func in _TO_REAL else None
        lengths = {at: 2 * (shape[at] - 1) if at == real else shape[at] for at in dims}
        lengths.update(zip(dims, s or ()))
        kept = {at: _merged([box[at] for box, _ in self.written]) for at in dims}
        if any(lengths[at] != shape[at] for at in dims if at != real) or (
            real is not None and kept[real][-1][1] > lengths[real] // 2 + 1
        ):
            return NotImplemented
        few = [_count(kept[at]) if at in kept else length for at, length in enumerate(shape)]
        if 2 * prod(few) > prod(shape):
            return NotImplemented
        with torch.enable_grad():
            x = self._among(kept, few, target)
            to = self._field(x, [lengths.get(at, length) for at, length in enumerate(shape)], kept)
            if to is not None:
                return _at_home(x, to, dims, kept, real, norm)
            others = sorted([at for at in dims if at != real],
                            key=lambda at: not x._meta.layout.dims[at])
            order = others if real is None else [real, *others]
            return _one_by_one(x, order, (), lambda x, at: (fft.irfft if at == real else fft.ifft)(
                _spread(x, at, kept[at]), n=lengths[at], dim=at, norm=norm))

    def _field(self, x: ShardTensor, shape: Sequence[int], kept: Ranges) -> Layout | None:
        """The layout of values of this shape where the dims of modes are sharded as those of the
        field that was transformed; None if none was, or an exchange of lines, which may lead to
        another layout, moves less than half."""
        near, own = self.fields.get(_key([*kept], shape)), x._meta.layout
        if near is None or near.mesh != own.mesh or (
            own.is_partial or x.dtype not in _COMPLEX
        ):
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
        are_few = all(_count(ranges) * to.num_shards(at) <= 2 * shape[at]
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
            out[_index([_placed(ends, kept[at]) if at in kept else ends
                        for at, ends in enumerate(box)])] = value
        return out


def _at_home(
    x: Any, to: Layout, dims: Sequence[int], kept: Ranges, real: int | None, norm: str | None
) -> Any:
    """The values of modes where a layout has them: each rank gets all modes that it needs."""
    gathered = to.gathered(dims)
    gathered = gathered.resized(tuple(x.shape), gathered.cuts)
    axes = {axis for dim in dims for axis in to.dims[dim]}
    partial = ["sum" if axis in axes else None for axis in range(len(gathered.partial))]
    _check_strict(x, gathered)
    x = x.redistribute(  # each rank's positions give a part of the modes' gradient
        x._meta.mesh, gathered, grad_placements=gathered.replace(partial=tuple(partial)))
    inner = [dim for dim in dims if dim != real]
    for dim in sorted(inner, key=lambda dim: not to.dims[dim]):
        if to.dims[dim]:
            x = at_positions(x, dim, kept[dim], to, norm)
        else:
            x = fft.ifft(_spread(x, dim, kept[dim]), n=to.shape[dim], dim=dim, norm=norm)
    if real is None:
        return x
    if to.dims[real]:
        return real_at_positions(x, real, kept[real], to, norm)
    return fft.irfft(_spread(x, real, kept[real]), n=to.shape[real], dim=real, norm=norm)


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
