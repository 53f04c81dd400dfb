"""The spectrum of a field, which waits for slices that say which modes are read."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, fft

from weft.core import Box
from weft.errors import UnsupportedOpError
from weft.tensor.placing.spectra.calls import SHIFTS, Fields, shifts_of
from weft.tensor.placing.spectra.dft import modes_of, one_by_one, summed
from weft.tensor.placing.spectra.ranges import Ranges, box_of, count, rolled, taken
from weft.tensor.placing.spectra.zeros import waiting_for
from weft.tensor.placing.waiting import (
    LIKE,
    Placed,
    Wait,
    become,
    get_item,
    items_of,
    like,
    set_item,
    unplaced,
)
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["Spectrum"]

_MOST = 8
"""Of so many boxes the modes are exchanged each by itself, those of all others together."""


class Spectrum(Wait):
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
        self.slices: list[tuple[weakref.ref[Any], str, Box]] = []
        """All slices, what they are of, and their boxes."""

    def waiting(self) -> Tensor:
        """The tensor that waits so."""
        return unplaced(self, self.shape, self.base.dtype.to_complex(), self.base.device)

    @property
    def is_leaf(self) -> bool:
        return not self.base.requires_grad

    @property
    def is_sharded(self) -> bool:
        return True

    def used(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is get_item:
            return self._slice(args[1])
        if func in SHIFTS:
            return self._shifted(shifts_of(func, self.shape, *args[1:], **kwargs))
        return self._like(func, args, kwargs) if func in LIKE else NotImplemented

    def _like(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A tensor like the spectrum: what nothing sharded is written to is sharded as that is."""
        def make() -> Tensor:
            become(args[0], None)
            return func(*args, **kwargs)

        return like(func, args, kwargs, lambda _, dtype: waiting_for(
            make, LIKE[func], dtype, self.fields))

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
        return one_by_one(
            x, dims, done, lambda x, dim: fft.fft(x, dim=dim, norm=self.norm))

    def _slice(self, index: Any) -> Any:
        box = box_of(self.shape, index)
        if box is None:
            return NotImplemented
        ranges = {dim: rolled(box[dim], -self.shifts.get(dim, 0), self.shape[dim])
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
        out = taken(self.read[key][0], {dim: ranges[dim] for dim in exchanged})
        items = [
            item if dim not in ranges else slice(None) if isinstance(item, slice) else 0
            for dim, item in enumerate(items_of(self.shape, index) or ())]
        out = out[tuple(items)]
        self.slices.append((weakref.ref(out), key, box))
        return out

    def writing(self, func: Any, args: Sequence[Any]) -> None:
        """Slices that are in use would have to change, too. `x[...] *= 2` is right: it writes to a
        slice first, and then writes that to the same box of `x`."""
        is_item = func is set_item
        for ref, key, box in self.slices:
            part = ref()
            if part is None:
                continue
            if not is_item or part is not args[2] or box != box_of(self.shape, args[1]):
                raise UnsupportedOpError(
                    "sharded_factories", "a spectrum is written to while a slice of it is in use",
                    "inside, a slice of a spectrum is transformed by itself: they share no memory",
                    [str(part.sharding)], "read spectrum[...].clone()")
            made, _ = self.read[key]
            self.read[key] = made, made._version

    def _exchanged_for(self, ranges: Ranges) -> list[int] | None:
        """The sharded dims that are transformed by an exchange to have these modes; None if all of
        the spectrum is no more."""
        layout, lengths = self.base._meta.layout, self.base.shape
        parts = {dim: count(ranges[dim]) / lengths[dim] for dim in self.dims}
        exchanged = [dim for dim in self.rest
                     if layout.dims[dim] and parts[dim] * layout.num_shards(dim) > 1]
        others = prod([parts[dim] for dim in self.dims if dim not in exchanged])
        # The real dim is exchanged as complex numbers, twice for modes of both signs.
        most = 0.25 if self.real in exchanged else 1.0
        return exchanged if others < most or not exchanged else None

    def _of(self, kept: Ranges, exchanged: Sequence[int]) -> Any:
        """The spectrum before it is rolled: these modes of some dims, all of the others."""
        out: Any = taken(self.base, {dim: kept[dim] for dim in self.first})
        for dim in self.rest:
            if dim not in exchanged and not out._meta.layout.dims[dim] and (
                4 * count(kept[dim]) > out.shape[dim]
            ):
                out = taken(fft.fft(out, dim=dim, norm=self.norm), {dim: kept[dim]})
            elif dim not in exchanged:
                out = modes_of(out, dim, kept[dim], self.norm)
        return self._exchanged(summed(out, [*kept], exchanged), exchanged, [*kept])

    def _shifted(self, shifts: Mapping[int, int]) -> Tensor:
        self._check()
        both = {dim: self.shifts.get(dim, 0) + shifts.get(dim, 0)
                for dim in {*self.shifts, *shifts}}
        return Spectrum(self.base, self.dims, self.first, self.real, self.norm, self.fields,
                         both).waiting()

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
