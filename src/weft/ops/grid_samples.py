"""`grid_sample`: each place of the result reads the image around a point that the grid names.

Batch and channels pass. Where positions of the image are sharded, the result's positions are
sharded as the grid's are, and data decide which rows a rank reads: it fetches the box around its
own points. The points are computed as torch's kernels compute them, from the global lengths, and
passed to torch's kernel as places of the box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Interval, Layout
from weft.ops.algorithm import Local
from weft.ops.indexing.boxes import BoxExchange
from weft.ops.indexing.index_layouts import held
from weft.ops.precision import widened
from weft.ops.taps import num_pieces
from weft.rules import Call, Decision, op, page, rule
from weft.transport.nodes import with_gradient

__all__ = ["PAGE"]

_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


def _at_shards(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local | None:
    """If positions are sharded, ranks first exchange between which rows their points are, and then
    fetch these rows."""
    x, grid = layouts
    dims = [dim for dim in range(2, x.ndim) if x.dims[dim]]
    if not dims or 0 in call.results[0].shape or 0 in x.shape:
        return None
    x, grid, result = _placed(x, grid, call.results[0].shape)

    options = call.args[2:5]

    def bind(mesh: BoundMesh) -> Callable[[Tensor, Tensor], Tensor]:
        if all(x.num_shards(dim) == 1 for dim in dims):
            return lambda image, grid: torch.grid_sampler(image, grid, *options)
        seen = [_Dim(x.ndim - 1 - dim, x.shape[dim], dim not in dims, *options)
                for dim in range(2, x.ndim)]
        return partial(_sampled, BoxExchange(mesh, x, dims), dims, seen)

    axes = tuple(sorted(axis for dim in dims for axis in x.dims[dim]))
    return Local(Decision((x, grid), (result,)), bind, communicates=axes)


def _placed(
    x: Layout, grid: Layout, shape: Sequence[int]
) -> tuple[Layout, Layout, Layout]:
    """The layouts of image, grid and result: axes stay where the image has them in the batch and
    the channels, then where the grid has them. What else shards the image's positions shards the
    result's, dim by dim."""
    x, every = x.without_partial(), {*range(x.mesh.ndim)}
    others = {axis for axes in x.dims[1:] for axis in axes}
    (batch,), (cuts,) = held(x.shape[:1], [x.take([0]), grid.take([0])], every - others)
    used = {*batch, *x.dims[1]}
    dims, all_cuts = held(shape[2:], [grid.take(range(1, grid.ndim - 1))], every - used)
    used.update(*dims)
    for at in range(2, x.ndim):
        for axis in x.dims[at]:
            if axis not in used:
                to = _roomiest(x, shape[2:], dims, at - 2, axis)
                dims[to], all_cuts[to] = (*dims[to], axis), None
    x = x.replace(dims=(batch, *x.dims[1:]), cuts=(cuts, *x.cuts[1:]))
    grid = Layout.make(x.mesh, grid.shape, (batch, *dims, ()), (cuts, *all_cuts, None))
    result = Layout.make(x.mesh, shape, (batch, x.dims[1], *dims), (cuts, x.cuts[1], *all_cuts))
    return x, grid, result


def _roomiest(
    x: Layout, lengths: Sequence[int], dims: Sequence[Sequence[int]], first: int, axis: int
) -> int:
    """The dim of positions that an axis goes to: the same one, unless it is too short."""
    sizes = x.mesh.axis_sizes
    room = [length // math.prod(sizes[one] for one in axes) for length, axes in zip(lengths, dims)]
    return first if room[first] >= sizes[axis] else room.index(max(room))


# On one rank.


@dataclass(frozen=True, slots=True)
class _Dim:
    """One dim of the image, as the points of a grid see it.

    Args:
        at: which component of the grid it is. length: of the dim. whole: whether all of it is read.
        mode, padding, aligned: of the call.
        turns: whether places outside of the image show others, which are read as they are.
    """

    at: int
    length: int
    whole: bool
    mode: int
    padding: int
    aligned: bool

    @property
    def bends(self) -> bool:
        """Whether beyond the ends a place does not move as its point does."""
        return self.padding != _ZEROS and not self.turns

    @property
    def turns(self) -> bool:
        return self.mode == _BICUBIC and self.padding != _ZEROS

    def points(self, grid: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The place before each point, how far the point lies behind it, and how the place moves
        with the point: 1, -1 or 0 times as far as without ends; None where it is 1 everywhere."""
        length = self.length
        place, slope = _places(grid[..., self.at], length, self.aligned), None
        if self.padding == _REFLECTION and not self.turns:
            place, slope = _reflected(place, length, self.aligned)
        if self.bends:
            # No gradient from the ends on, and NaN is the first place.
            inner = (place > 0) & (place < length - 1)
            slope = inner.to(torch.int8) if slope is None else slope * inner
            place = torch.where(place > 0, place, 0)
            place = torch.where(place < length - 1, place, length - 1)
        base = place.round() if self.mode == _NEAREST else place.floor()
        beyond = place * 0 if self.mode == _NEAREST else place - base
        if self.turns and self.padding == _BORDER:
            base = base.clamp(-3, length + 1)
        elif self.turns:
            # Points turn twice within a period: it begins half a length before the first place, so
            # that those of a rank that lies at an end stay side by side.
            period = 2 * (length - 1 if self.aligned else length)
            base = base - (base / period + 0.25).floor() * period if period else base * 0
        return base, beyond, slope

    def reads(self, grid: Tensor) -> Interval:
        """The places that are read in all."""
        if self.whole and not self.turns:
            return 0, self.length
        before, after = {_BILINEAR: (0, 1), _NEAREST: (0, 0), _BICUBIC: (1, 2)}[self.mode]
        found = [_ends(self.points(piece)[0]) for (piece,) in _pieces(grid)]
        ends = [one for one in found if one is not None]
        start = min([low for low, _ in ends], default=0) - before
        stop = max([high for _, high in ends], default=0) + after + 1
        if not self.turns:
            start = min(max(start, 0), self.length - 1)
            stop = max(min(stop, self.length), start + 1)
        return start, stop

    def shown(self, reads: Interval) -> Tensor:
        """The places that stand at these: the same, or others where they are beyond the ends."""
        places = torch.arange(*reads)
        if not self.turns:
            return places
        if self.padding == _BORDER:
            return places.clamp(0, self.length - 1)
        return _reflected(places.double(), self.length, self.aligned)[0].long()

    def scale(self, size: int, aligned: bool) -> float:
        """How far a point moves in a box of so many places, as a multiple of how far it moves in
        the grid."""
        moves = self.length - 1 if self.aligned else self.length
        return 0.0 if self.mode == _NEAREST else moves / (size - 1 if aligned else size)


def _sampled(
    exchange: BoxExchange, dims: Sequence[int], seen: Sequence[_Dim], x: Tensor, grid: Tensor
) -> Tensor:
    reads = [dim.reads(grid.detach()) for dim in seen]
    shown = [dim.shown(each) for dim, each in zip(seen, reads)]
    box = [(int(places.min()), int(places.max()) + 1) for places in shown]
    image = exchange.fetch(x, [box[dim - 2] for dim in dims])
    for at, (dim, places) in enumerate(zip(seen, shown)):
        start = box[at][0] if at + 2 in dims else 0
        if dim.turns:
            image = image.index_select(at + 2, (places - start).to(x.device))
    image = widened(image)
    # Aligned, the ends of the box are exact: points beyond the image are put there.
    aligned = (seen[0].aligned or seen[0].bends) and min(image.shape[2:]) > 1
    inside = _in_box(grid, seen, reads, aligned, image.dtype)
    # Not torch's function, which may take cuDNN's kernel: that rounds otherwise.
    kernel = torch.ops.aten.grid_sampler_3d if len(seen) == 3 else torch.ops.aten.grid_sampler_2d
    return kernel(image, inside, seen[0].mode, _ZEROS, aligned).to(x.dtype)


def _pieces(*grids: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of grids of one shape, along their longest dim of positions."""
    first = grids[0]
    dim = max(range(first.dim() - 1), key=first.shape.__getitem__)
    size = max(-(-first.shape[dim] // num_pieces(first)), 1)
    return zip(*[grid.split(size, dim) for grid in grids])


def _in_box(
    grid: Tensor, dims: Sequence[_Dim], reads: Sequence[Interval], aligned: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The points of a grid as -1 to 1 of a box, a piece at a time. Autograd keeps none of them; if
    places do not move as their points do beyond the ends, it keeps a byte for each."""
    out = torch.empty_like(grid, dtype=dtype, memory_format=torch.contiguous_format)
    needs_grad = grid.requires_grad and torch.is_grad_enabled()
    bends = needs_grad and any(dim.bends for dim in dims)
    slopes = torch.ones_like(out, dtype=torch.int8) if bends else None
    grids = (grid.detach(), out) if slopes is None else (grid.detach(), out, slopes)
    scales = [0.0] * len(dims)
    for dim, (start, stop) in zip(dims, reads):
        scales[dim.at] = dim.scale(stop - start, aligned)
        for points, inside, *slope in _pieces(*grids):
            base, beyond, moves = dim.points(points)
            inside[..., dim.at] = _inside(base - start, beyond, stop - start, aligned, dtype)
            if slope and moves is not None:
                slope[0][..., dim.at] = moves
    own = grid.dtype
    return with_gradient(grid, lambda _: out, lambda grad: _scaled(grad, slopes, scales, own))


def _scaled(
    grad: Tensor, slopes: Tensor | None, scales: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """The gradient of the grid, of that of the points in the box; its own transpose."""
    def do(grad: Tensor) -> Tensor:
        out = torch.empty_like(grad, dtype=dtype)
        for at, scale in enumerate(scales):
            out[..., at] = grad[..., at] * scale
        return out if slopes is None else out.mul_(slopes)

    own = grad.dtype
    return with_gradient(grad, do, lambda grad: _scaled(grad, slopes, scales, own))


def _places(grid: Tensor, length: int, aligned: bool) -> Tensor:
    """Points as places, rounded as torch's kernels round: they multiply and subtract at once."""
    if grid.is_cuda:
        grid = widened(grid)
    grid, scale = grid + 1, (length - 1 if aligned else length) / 2
    exact = grid.double() if grid.dtype is torch.float32 else grid
    place = exact * scale
    return (place if aligned else place - 0.5).to(grid.dtype)


def _reflected(place: Tensor, length: int, aligned: bool) -> tuple[Tensor, Tensor]:
    """Points outside turn back at the ends: at the first and last place, or half a place beyond.
    And whether they move on, or back."""
    low, span = (0.0, length - 1) if aligned else (-0.5, length)
    if not span:
        return place * 0, torch.zeros_like(place, dtype=torch.int8)
    place = place - low
    away = place.abs()
    away = away - (away / (2 * span)).trunc() * (2 * span)
    turned = 2 * span - away
    slope = place.sign() * (turned - away).sign()
    return torch.minimum(away, turned) + low, slope.nan_to_num().to(torch.int8)


def _ends(base: Tensor) -> Interval | None:
    """The first and the last of some places, without those that are no numbers; None of none."""
    if not base.numel():
        return None
    low, high = torch.stack(base.aminmax()).tolist()
    if math.isfinite(low) and math.isfinite(high):
        return int(low), int(high)
    return _ends(base[base.isfinite()])


def _inside(
    base: Tensor, beyond: Tensor, size: int, aligned: bool, dtype: torch.dtype
) -> Tensor:
    """Points as -1 to 1 of a box, so that the kernel, which rounds, takes the same place before
    each: where it would take another one, a point keeps a distance to whole places."""
    span, shift = (size - 1, 0) if aligned else (size, 1)
    base, beyond = base.to(dtype), beyond.to(dtype)
    least = min(size * torch.finfo(dtype).eps, 0.25)
    apart = (2 * (base + beyond.clamp(least, 1 - least)) + shift) / span - 1
    if dtype is torch.float64:  # `_places` does not round as the kernel does
        return apart
    inside = (2 * (base + beyond) + shift) / span - 1
    return torch.where(_places(inside, size, aligned).floor() == base, inside, apart)


PAGE = page(
    op("grid_sampler grid_sampler_2d grid_sampler_3d", rule(
        "b c h! w!, b y x 2 -> b c y x", "b c d! h! w!, b z y x 3 -> b c z y x", linear=[0]),
       layouts=_at_shards),
)
