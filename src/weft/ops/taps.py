"""Taps: the places of a dim that each place of a result reads, and their weights.

All of them are computed as torch's kernels compute them, from the whole lengths, in the dtype of
the kernels: a source is `scale * (place + 0.5) - 0.5`, or `scale * place` where corners are
aligned (torch's `UpSample.h`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.ops.precision import widened
from weft.rules import Table
from weft.transport.nodes import with_gradient

__all__ = [
    "Making", "Nearest", "Parts", "Resized", "Taps", "num_pieces", "resampled",
    "table_of", "taps_of",
]


def num_pieces(x: Tensor) -> int:
    """In how many parts to work on a tensor, so that the copies of a part are small beside it."""
    return min(8, 1 + x.numel() * x.element_size() // 2**16)


@dataclass(frozen=True, slots=True)
class Resized:
    """How one dim gets another length.

    Args:
        mode: "linear", "cubic", or one of a filter: "linear_aa", "cubic_aa", "lanczos_aa".
        before, after: its lengths. scale: the call's value of after / before, or None.
        aligned: whether the corners' centres lie upon each other.
        dtype: to compute in.
    """

    mode: str
    before: int
    after: int
    aligned: bool
    scale: float | None
    dtype: torch.dtype

    def reads(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the last place that each of these places of the result reads, on any
        device."""
        first, last = taps_of(self, places).ends(self.before)
        if self.dtype == torch.float64:
            other, end = taps_of(self, places, "cpu").ends(self.before)
            first, last = torch.minimum(first, other), torch.maximum(last, end)
        return first, last


Parts = list[tuple[Tensor | None, Tensor, Tensor]]
"""Per tap: the places of the result that have it (None for all), what they read, the weights."""

Making = Callable[[int, int, str], Parts]
"""The taps of the places start..stop of a result, on a type of device."""

Stretches = Callable[[], Iterable[tuple[int, int, Parts]]]
"""The taps of a result, stretch by stretch: (start, stop, taps)."""


@dataclass(frozen=True, slots=True)
class Taps:
    """Per tap and place of a result: the place that is read, its weight, and whether it counts."""

    places: Tensor
    weights: Tensor
    counts: Tensor

    def ends(self, length: int) -> tuple[Tensor, Tensor]:
        """The first and the last place of a dim of this length that each place of the result
        reads."""
        first = self.places.masked_fill(~self.counts, length).amin(0)
        return first, self.places.masked_fill(~self.counts, -1).amax(0)

    def table(self, length: int) -> Table:
        """What each place of the result reads of a dim of this length."""
        first, last = self.ends(length)
        return Table(tuple(first.cummax(0)[0].tolist()), tuple((last + 1).cummax(0)[0].tolist()),
                     length)

    def of(self, start: int, stop: int, origin: int) -> Parts:
        """The taps of the places start..stop of the result, in a box that begins at `origin`."""
        found = []
        for places, weights, counts in zip(self.places, self.weights, self.counts):
            mine = counts[start:stop]
            rows = None if mine.all() else mine.nonzero().flatten().int()
            read, by = (places[start:stop] - origin).int(), weights[start:stop]
            if rows is not None:
                read, by = read[rows], by[rows]
            if read.numel():
                found.append((rows, read, by))
        return found


def resampled(
    parts: Sequence[tuple[int, int, Making]], rest: Callable[[Tensor], Tensor] | None
) -> Callable[[Tensor], Tensor]:
    """Weighted sums along some dims, of which the results have these lengths; then the `rest`, of
    the other dims. Taps are kept where they are small beside the tensor; else made when used."""
    kept: dict[Any, Parts] = {}

    def stretches(x: Tensor, dim: int, length: int, make: Making) -> Stretches:
        def made(start: int, stop: int) -> Parts:
            with torch.inference_mode(False), torch.no_grad():  # other calls may save them
                return [tuple([_on(one, x.device) for one in tap])
                        for tap in make(start, stop, x.device.type)]

        if length > _STRETCH and x.numel() < _THIN * x.shape[dim]:
            return lambda: (
                (start, min(start + _STRETCH, length), made(start, min(start + _STRETCH, length)))
                for start in range(0, length, _STRETCH))
        key = dim, x.device
        if key not in kept:
            kept[key] = made(0, length)
        whole = [(0, length, kept[key])]
        return lambda: whole

    def run(x: Tensor) -> Tensor:
        out = widened(x)
        for dim, length, make in parts:
            out = _weighted(out, dim, stretches(out, dim, length, make), length)
        return (out if rest is None else rest(out)).to(x.dtype)

    return run


_STRETCH, _THIN = 1 << 13, 8
"""Along a longer dim, taps of a tensor with fewer elements per place are made when used."""


def _on(one: Tensor | None, device: torch.device) -> Any:
    return None if one is None else one.to(device, copy=one.is_inference())


def _weighted(x: Tensor, dim: int, stretches: Stretches, length: int) -> Tensor:
    """Autograd keeps no tensor of it, and adds up what all taps give in one gradient."""
    before = x.shape[dim]

    def do(x: Tensor) -> Tensor:
        out = _zeros(x, dim, length)
        for start, stop, taps in stretches():
            for piece, sums in _pieces(x, out.narrow(dim, start, stop - start), dim):
                for rows, places, weights in taps:
                    part = piece.index_select(dim, places).mul_(_along(weights, x, dim))
                    if rows is None:
                        sums += part
                    else:
                        sums.index_add_(dim, rows, part)
        return out

    return with_gradient(x, do, lambda grad: _spread(grad, dim, stretches, before))


def _spread(grad: Tensor, dim: int, stretches: Stretches, length: int) -> Tensor:
    """The transpose of `_weighted`: each place of the result adds to those that it read."""
    before = grad.shape[dim]

    def do(grad: Tensor) -> Tensor:
        out = _zeros(grad, dim, length)
        for start, stop, taps in stretches():
            for piece, sums in _pieces(grad.narrow(dim, start, stop - start), out, dim):
                for rows, places, weights in taps:
                    part = piece if rows is None else piece.index_select(dim, rows)
                    sums.index_add_(dim, places, part * _along(weights, grad, dim))
        return out

    return with_gradient(grad, do, lambda grad: _weighted(grad, dim, stretches, before))


def _pieces(x: Tensor, out: Tensor, dim: int) -> list[tuple[Tensor, Tensor]]:
    """Parts of both, cut alike along the longest dim beside this one."""
    at = max([other for other in range(x.dim()) if other != dim], key=x.shape.__getitem__)
    size = max(-(-x.shape[at] // num_pieces(max(x, out, key=Tensor.numel))), 1)
    return list(zip(x.split(size, at), out.split(size, at)))


def _along(weights: Tensor, x: Tensor, dim: int) -> Tensor:
    return weights.view([-1, *[1] * (x.dim() - 1 - dim)])


def _zeros(x: Tensor, dim: int, length: int) -> Tensor:
    return x.new_zeros([*x.shape[:dim], length, *x.shape[dim + 1 :]])


def taps_of(dim: Resized, places: Tensor, device: str = "") -> Taps:
    """The taps of these places of a dim. In double precision, the CPU's kernels round a source to
    single before the floor; one that rounds up to the next place is there."""
    if dim.before == dim.after and dim.mode != "cubic":  # whatever scale is given
        one = torch.ones(1, len(places), dtype=dim.dtype)
        return Taps(places[None], one, one.bool())
    if dim.mode.endswith("_aa"):
        return _filtered(dim, places)
    source = _sources(dim, places)
    if dim.mode == "linear":
        source = source.clamp(0, dim.before - 1)
    whole = source.float() if device == "cpu" else source
    first = whole.floor().long().clamp(max=dim.before - 1)
    beyond = (source - first).clamp(0, 1)
    if dim.mode == "linear":
        second = (first + 1).clamp(max=dim.before - 1)
        counts = torch.stack([torch.ones_like(first, dtype=torch.bool), second > first])
        return Taps(torch.stack([first, second]), torch.stack([1 - beyond, beyond]), counts)
    near = torch.stack([first + shift for shift in (-1, 0, 1, 2)]).clamp(0, dim.before - 1)
    weights = torch.stack([_cubic(abs(beyond - shift), -0.75) for shift in (-1, 0, 1, 2)])
    # Where the first two sources are places, all are: of each, the place itself counts alone.
    two = _sources(dim, torch.arange(min(dim.after, 2)))
    apart = not two.equal(two.floor())
    counts = torch.tensor([[apart], [True], [apart], [apart]])
    return Taps(near, weights, counts.expand_as(weights))


def _sources(dim: Resized, places: Tensor) -> Tensor:
    """Where the sources of places lie."""
    places = places.to(dim.dtype)
    source = _scale(dim) * (places if dim.aligned else places + 0.5)
    return source if dim.aligned else source - 0.5


def _scale(dim: Resized) -> Tensor:
    """How far the sources of neighbouring places lie apart."""
    if dim.aligned:
        steps = torch.tensor(dim.before - 1, dtype=dim.dtype)
        return steps / (dim.after - 1) if dim.after > 1 else steps * 0
    return _ratio(dim.before, dim.after, dim.scale, dim.dtype)


def _ratio(before: int, after: int, scale: float | None, dtype: torch.dtype) -> Tensor:
    if scale is not None and scale > 0:
        return torch.tensor(1.0 / scale, dtype=torch.float64).to(dtype)
    return torch.tensor(before, dtype=dtype) / after


def _cubic(x: Tensor, a: float) -> Tensor:
    """The cubic convolution kernel of Keys (1981), of distances that are not negative."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0))


_FILTERS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "linear_aa": (2, lambda x: (1 - x).clamp(min=0)),
    "cubic_aa": (4, lambda x: _cubic(x, -0.5)),
    "lanczos_aa": (6, lambda x: torch.where(x < 3, torch.sinc(x) * torch.sinc(x / 3), 0)),
}
"""Per mode the width of its filter, and the filter as a function of the distance."""


def _filtered(dim: Resized, places: Tensor) -> Taps:
    """The taps of a filter that is as wide as the steps between sources."""
    width, function = _FILTERS[dim.mode]
    scale = _scale(dim)
    spread = scale.clamp(min=1)
    centre = scale * (places.to(dim.dtype) + 0.5)
    support = width * 0.5 * spread
    first = (centre - support + 0.5).long().clamp(min=0)
    stop = (centre + support + 0.5).long().clamp(max=dim.before)
    most = 2 * int(support.ceil()) + 1
    places = first + torch.arange(most)[:, None]
    counts = places < stop
    weights = function(((places - centre + 0.5) * (1 / spread)).abs()) * counts
    total = weights.sum(0)
    weights = torch.where(total != 0, weights / total, weights)
    return Taps(places.clamp(max=dim.before - 1), weights, counts)


@dataclass(frozen=True, slots=True)
class Nearest:
    """How one dim gets another length by copies of single places.

    Args:
        before, after: its lengths. scale: the call's value of after / before, or None.
        exact: whether a place copies the one under its centre.
    """

    before: int
    after: int
    scale: float | None
    exact: bool

    def reads(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the last place that each of these places of the result may copy. Kernels
        compute in single or in double precision, and some take lengths by halves: where they round
        apart, these differ."""
        sources = self._sources(places)
        low = high = next(sources).floor().long()
        for source in sources:
            place = source.floor_().long()
            low, high = torch.minimum(low, place), torch.maximum(high, place)
        return low.clamp(0, self.before - 1), high.clamp(0, self.before - 1)

    def _sources(self, places: Tensor) -> Iterator[Tensor]:
        """Where the sources of places lie, as kernels round them: before the floor, those that
        compute in double precision round to single."""
        if self.before == self.after:
            yield places
        if self.after == 2 * self.before:
            yield places // 2
        for dtype in (torch.float32, torch.float64):
            ratio = _ratio(self.before, self.after, self.scale, dtype)
            if self.exact:
                centre = places.to(dtype) + 0.5
                yield (ratio * centre - 0.5).clamp(min=0) + 0.5
                yield (ratio.double() * centre).to(dtype)
            else:
                centre = places
            yield (ratio * centre).float()
            yield ratio * centre

    def known(self, start: int, stop: int) -> Tensor | None:
        """The places that places start..stop copy; None where kernels round apart."""
        parts: list[Tensor] = []
        for first in range(start, stop, 1 << 14):
            low, high = self.reads(torch.arange(first, min(first + (1 << 14), stop)))
            if not low.equal(high):
                return None
            parts.append(low.int())
        return torch.cat(parts)


def table_of(dim: Resized | Nearest) -> Table:
    """What each place of the result reads."""
    starts, stops = _Reads(dim, 0), _Reads(dim, 1)
    if dim.after <= _SHORT:
        return Table(tuple(starts[:]), tuple(stops[:]), dim.before)
    return Table(starts, stops, dim.before)


_SHORT = 1 << 14
"""The length up to which all places are computed at once."""


@dataclass(frozen=True, slots=True)
class _Reads(Sequence[int]):
    """Per place, the beginning (0) or the end (1) of what it reads, computed where asked for: a few
    places decide what shards read of a long dim."""

    dim: Resized | Nearest
    end: int

    def __len__(self) -> int:
        return self.dim.after

    def __getitem__(self, place: Any) -> Any:
        places = range(len(self))[place]
        if isinstance(places, int):
            return self[places : places + 1][0]
        found = self.dim.reads(torch.arange(places.start, places.stop, places.step))
        return (found[self.end] + self.end).tolist()
