"""`grid_sample`: each place of the result reads the image around a point that the grid names.

Batch and channels pass. Where positions of the image are sharded, the result's positions are
sharded as the grid's are, and data decide which rows a rank reads: it fetches the box around its
own points. The points are computed as torch's kernels compute them, from the global lengths, and
passed to torch's kernel as places of the box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Interval, Layout
from weft.ops.algorithm import Local
from weft.ops.indexing.boxes import BoxExchange
from weft.ops.precision import widened
from weft.rules import Call, Decision, op, page, rule

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

    mode, padding, aligned = call.args[2:5]

    def bind(mesh: BoundMesh) -> Callable[[Tensor, Tensor], Tensor]:
        if all(x.num_shards(dim) == 1 for dim in dims):
            return lambda image, grid: torch.grid_sampler(image, grid, mode, padding, aligned)
        exchange = BoxExchange(mesh, x, dims)
        return partial(_sampled, exchange, dims, tuple(x.shape[2:]), mode, padding, aligned)

    axes = tuple(sorted(axis for dim in dims for axis in x.dims[dim]))
    return Local(Decision((x, grid), (result,)), bind, communicates=axes)


def _placed(
    x: Layout, grid: Layout, shape: Sequence[int]
) -> tuple[Layout, Layout, Layout]:
    """The layouts of image, grid and result: axes stay where the image has them in the batch and
    the channels, then where the grid has them. What else shards the image's positions shards the
    result's, dim by dim."""
    x = x.without_partial()
    taken = {axis for axes in x.dims for axis in axes}
    batch, cuts = x.dims[0], x.cuts[0]
    if not batch:
        batch = tuple([axis for axis in grid.dims[0] if axis not in taken])
        cuts = grid.cuts[0] if batch == grid.dims[0] else None
    used = {*batch, *x.dims[1]}
    dims, all_cuts = [batch], [cuts]
    for at in range(1, grid.ndim - 1):
        axes = tuple([axis for axis in grid.dims[at] if axis not in used])
        used |= {*axes}
        dims.append(axes)
        all_cuts.append(grid.cuts[at] if axes == grid.dims[at] else None)
    for at in range(2, x.ndim):
        for axis in x.dims[at]:
            if axis not in used:
                to = _roomiest(x, shape[2:], dims[1:], at - 2, axis) + 1
                dims[to], all_cuts[to] = (*dims[to], axis), None
    x = Layout.make(x.mesh, x.shape, (batch, *x.dims[1:]), (cuts, *x.cuts[1:]))
    grid = Layout.make(x.mesh, grid.shape, (*dims, ()), (*all_cuts, None))
    result = Layout.make(
        x.mesh, shape, (batch, x.dims[1], *dims[1:]), (cuts, x.cuts[1], *all_cuts[1:]))
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
class _Points:
    """The points of a grid along one dim of the image.

    Args:
        base: the place before each point, and `beyond`: how far the point lies behind it.
        reads: the places that are read in all, of `base` or nearby ones.
        turns: whether places outside of the image show others, which `reads` names as they are.
    """

    base: Tensor
    beyond: Tensor
    reads: Interval
    turns: bool


def _sampled(
    exchange: BoxExchange, dims: Sequence[int], lengths: tuple[int, ...], mode: int, padding: int,
    aligned: bool, x: Tensor, grid: Tensor,
) -> Tensor:
    last = len(lengths) - 1
    points = [
        _points(grid[..., last - at], length, mode, padding, aligned, at + 2 not in dims)
        for at, length in enumerate(lengths)
    ]
    shown = [
        _shown(each.reads, length, padding, aligned) if each.turns else torch.arange(*each.reads)
        for each, length in zip(points, lengths)
    ]
    box = [(int(places.min()), int(places.max()) + 1) for places in shown]
    image = exchange.fetch(x, [box[dim - 2] for dim in dims])
    for at, (each, places) in enumerate(zip(points, shown)):
        start = box[at][0] if at + 2 in dims else 0
        if each.turns:
            image = image.index_select(at + 2, (places - start).to(x.device))
    image = widened(image)
    inside = [_inside(each, image.dtype) for each in reversed(points)]
    kernel = torch.ops.aten.grid_sampler_3d if len(lengths) == 3 else torch.ops.aten.grid_sampler_2d
    return kernel(image, torch.stack(inside, -1), mode, _ZEROS, False).to(x.dtype)


def _points(
    grid: Tensor, length: int, mode: int, padding: int, aligned: bool, whole: bool
) -> _Points:
    """Where the numbers -1 to 1 of a grid lie in a dim of this length, which may be read whole."""
    place = _places(grid, length, aligned)
    turns = mode == _BICUBIC and padding != _ZEROS
    if padding == _REFLECTION and not turns:
        place = _reflected(place, length, aligned)
    if padding != _ZEROS and not turns:  # no gradient from the ends on, and NaN is the first place
        place = torch.where(place > 0, place, 0)
        place = torch.where(place < length - 1, place, length - 1)
    base = (place.round() if mode == _NEAREST else place.floor()).detach()
    beyond = place * 0 if mode == _NEAREST else place - base
    if turns and padding == _BORDER:
        base = base.clamp(-3, length + 1)
    elif turns:
        # Points turn twice within a period: it begins half a length before the first place, so that
        # those of a rank that lies at an end stay side by side.
        period = 2 * (length - 1 if aligned else length)
        base = base - (base / period + 0.25).floor() * period if period else base * 0
    if whole and not turns:
        return _Points(base, beyond, (0, length), turns)
    before, after = {_BILINEAR: (0, 1), _NEAREST: (0, 0), _BICUBIC: (1, 2)}[mode]
    start, stop = _ends(base)
    start, stop = start - before, stop + after + 1
    if not turns:
        start = min(max(start, 0), length - 1)
        stop = max(min(stop, length), start + 1)
    return _Points(base, beyond, (start, stop), turns)


def _places(grid: Tensor, length: int, aligned: bool) -> Tensor:
    """Points as places, rounded as torch's kernels round: they multiply and subtract at once."""
    if grid.is_cuda:
        grid = widened(grid)
    grid, scale = grid + 1, (length - 1 if aligned else length) / 2
    exact = grid.double() if grid.dtype is torch.float32 else grid
    place = exact * scale
    return (place if aligned else place - 0.5).to(grid.dtype)


def _reflected(place: Tensor, length: int, aligned: bool) -> Tensor:
    """Points outside turn back at the ends: at the first and last place, or half a place beyond."""
    low, span = (0.0, length - 1) if aligned else (-0.5, length)
    if not span:
        return place * 0
    away = (place - low).abs()
    away = away - (away / (2 * span)).trunc().detach() * (2 * span)
    return torch.minimum(away, 2 * span - away) + low


def _ends(base: Tensor) -> Interval:
    """The first and the last of some places that are numbers; of none, the first of all."""
    if not base.numel():
        return 0, 0
    low, high = torch.stack(base.aminmax()).tolist()
    if math.isfinite(low) and math.isfinite(high):
        return int(low), int(high)
    return _ends(base[base.isfinite()])


def _shown(reads: Interval, length: int, padding: int, aligned: bool) -> Tensor:
    """The places that stand at these, inside of the image or beyond its ends."""
    places = torch.arange(*reads)
    if padding == _BORDER:
        return places.clamp(0, length - 1)
    if not aligned:
        places = places.remainder(2 * length)
        return torch.minimum(places, 2 * length - 1 - places)
    if length == 1:
        return places * 0
    places = places.remainder(2 * length - 2)
    return torch.minimum(places, 2 * length - 2 - places)


def _inside(points: _Points, dtype: torch.dtype) -> Tensor:
    """Points as -1 to 1 of a box. They keep a distance to whole places, so that the kernel, which
    rounds, takes the same place before each."""
    start, stop = points.reads
    size = stop - start
    least = min(size * torch.finfo(dtype).eps, 0.25)
    beyond = points.beyond.to(dtype)
    kept = beyond.detach().clamp(least, 1 - least) if beyond.requires_grad else beyond.detach()
    beyond = beyond + (kept - beyond.detach())
    return (2 * ((points.base - start).to(dtype) + beyond) + 1) / size - 1


PAGE = page(
    op("grid_sampler grid_sampler_2d grid_sampler_3d", rule(
        "b c h! w!, b y x 2 -> b c y x", "b c d! h! w!, b z y x 3 -> b c z y x", linear=[0]),
       layouts=_at_shards),
)
