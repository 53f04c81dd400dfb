"""Adaptive pools: each place of the result reads about an equal part of the positions.

Place `o` of `m` reads the places floor(o n / m) to ceil((o + 1) n / m) of `n` (torch's
`AdaptivePooling.h`). Batch and channels pass. If positions are sharded, each rank fetches those
that its places read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from weft.ops.convolutions import num_positions
from weft.ops.places import apart, counted, taken
from weft.ops.pools import with_places
from weft.ops.taps import Making, Parts, Taps, num_pieces, resampled
from weft.rules import Boxed, BoxedDim, Call, OnRank, Table, op, page, rule

__all__ = ["PAGE"]


@lru_cache(maxsize=256)
def _taps(before: int, after: int, dtype: torch.dtype) -> Taps:
    """The taps of a mean over each part."""
    place = torch.arange(after)
    starts, stops = place * before // after, -(-(place + 1) * before // after)
    lengths = stops - starts
    places = starts + torch.arange(int(lengths.max()) if after else 0)[:, None]
    counts = places < stops
    weights = torch.ones(places.shape, dtype=dtype) / lengths
    return Taps(torch.minimum(places, stops - 1), weights, counts)


def _lengths(call: Call) -> list[tuple[int, int]]:
    """Per dim of positions, its length before and after."""
    num = num_positions(call)
    return list(zip(call.tensors[0].shape[-num:], call.results[0].shape[-num:]))


def _tables(call: Call) -> Mapping[str, Table]:
    return {
        f"y{at}": _taps(before, after, torch.float32).table(before)
        for at, (before, after) in enumerate(_lengths(call))
    }


def _text(call: Call, wants_grad: Sequence[bool]) -> str | None:
    """Positions by a table of what each reads: of one dim, "b c @y0 -> b c y0"."""
    num = num_positions(call)
    floats = "float" in call.tensors[0].dtype
    all_of_dim = [after == 1 < before for before, after in _lengths(call)]
    if floats and (any(all_of_dim) if "avg" in call.op else all(all_of_dim)):
        return None
    lead = "c" if len(call.tensors[0].shape) == num + 1 else "b c"
    windows = " ".join([f"@y{at}" if floats else f"y{at}!" for at in range(num)])
    made = f"{lead} {' '.join([f'y{at}' if floats else f't{at}' for at in range(num)])}"
    return f"{lead} {windows} -> {', '.join([made] * len(call.results))}"


def _on_box(call: Call, boxed: Boxed) -> OnRank:
    """Means of parts along dims of which boxes were fetched; greatest elements of parts."""
    if not any(dim.box is not None for dim in boxed.dims):
        return None, boxed.args, boxed.kwargs
    if all(_has_own_parts(dim, *lengths) for dim, lengths in zip(boxed.dims, _lengths(call))):
        return _of_box(call, boxed.dims), boxed.args[:1], {}
    if "avg" in call.op:
        return _mean(call, [dim for dim in boxed.dims if dim.box]), boxed.args[:1], {}
    return _greatest(call, boxed.dims), boxed.args[:1], {}


def _has_own_parts(dim: BoxedDim, before: int, after: int) -> bool:
    """Whether the parts of a dim are those that its box alone would have."""
    if dim.box is None:
        return True
    (start, stop), (low, high) = dim.outputs, dim.box
    length, count = high - low, stop - start
    return all(
        place * before // after - low == (place - start) * length // count
        and -(-(place + 1) * before // after) - low == -(-(place + 1 - start) * length // count)
        for place in range(start, stop))


def _of_box(call: Call, dims: Sequence[BoxedDim]) -> Callable[[Tensor], Any]:
    """torch's pool of the box, with places in the whole dims."""
    function = getattr(torch.ops.aten, call.base).default
    pool = partial(function, output_size=[dim.outputs[1] - dim.outputs[0] for dim in dims])
    if len(call.results) == 1:
        return pool
    starts = {at: dim.box[0] for at, dim in enumerate(dims) if dim.box is not None}
    return with_places(pool, [dim.length for dim in dims], starts)


def _mean(call: Call, fetched: Sequence[BoxedDim]) -> Callable[[Tensor], Tensor]:
    """Weighted sums along the fetched dims, torch's kernel along the others."""
    num, lengths = num_positions(call), _lengths(call)
    first = len(call.tensors[0].shape) - num
    after = [length for _, length in lengths]
    parts: list[tuple[int, int, Making]] = []
    dtype = torch.float64 if call.tensors[0].dtype == "float64" else torch.float32
    for dim in fetched:
        after[dim.dim - first] = dim.outputs[1] - dim.outputs[0]
        make = partial(_of_part, lengths[dim.dim - first], dtype, dim)
        parts.append((dim.dim, after[dim.dim - first], make))
    kernel = getattr(torch.ops.aten, f"adaptive_avg_pool{num}d").default
    return resampled(parts, partial(kernel, output_size=after) if len(fetched) < num else None)


def _of_part(
    lengths: tuple[int, int], dtype: torch.dtype, dim: BoxedDim, start: int, stop: int, _: str
) -> Parts:
    """The taps of some of the places of the result that a rank computes."""
    assert dim.box is not None
    first = dim.outputs[0]
    return _taps(*lengths, dtype).of(first + start, first + stop, dim.box[0])


def _greatest(call: Call, dims: Sequence[BoxedDim]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Of each part the greatest element and its place; a few parts at a time, because they are
    copied (`_found`)."""
    num = num_positions(call)
    sizes, rows, starts = [], [], []
    for dim, (before, after) in zip(dims, _lengths(call)):
        start, stop = dim.outputs
        places = _taps(before, after, torch.float32).places[:, start:stop]
        sizes.append(len(places))
        starts.append(0 if dim.box is None else dim.box[0])
        rows.append(places.T.flatten())
    lengths = [dim.length for dim in dims]

    @cache
    def rows_on(device: torch.device) -> list[Tensor]:
        with torch.inference_mode(False):  # a later call may save them for its backward
            return [row.to(device, copy=True) for row in rows]

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        mine = rows_on(x.device)
        planes = x.detach().flatten(0, -num - 1).unsqueeze(1)
        boxes = [row - start for row, start in zip(mine, starts)]
        counts = [len(planes), *[len(row) // size for row, size in zip(mine, sizes)]]
        longest = max(range(num + 1), key=counts.__getitem__)
        here, there = [], []
        step = -(-counts[longest] // num_pieces(x))
        for first in range(0, counts[longest], step):
            piece = slice(first, min(first + step, counts[longest]))
            found = _found(planes, boxes, sizes, longest, piece)
            lead = torch.arange(counts[0], device=x.device)
            lead = (lead if longest else lead[piece]).view([-1, *[1] * num])
            here.append(counted([lead, *found], x.shape[-num:]))
            there.append(counted([place + start for place, start in zip(found, starts)], lengths))
        shape = x.shape[:-num]
        values = taken(x, torch.cat(here, longest).unflatten(0, shape))
        return values, torch.cat(there, longest).unflatten(0, shape)

    return run


def _found(
    planes: Tensor, rows: Sequence[Tensor], sizes: Sequence[int], dim: int, piece: slice
) -> list[Tensor]:
    """Per dim of positions, where the greatest elements of a piece of the results are: parts of
    one length side by side, where a shorter one shows its last place again, in torch's pool."""
    rows = list(rows)
    if dim:
        size = sizes[dim - 1]
        rows[dim - 1] = rows[dim - 1][piece.start * size : piece.stop * size]
    else:
        planes = planes[piece]
    for at, row in enumerate(rows, 2):
        planes = planes.index_select(at, row)
    kernel = getattr(torch.ops.aten, f"max_pool{len(rows)}d_with_indices").default
    places = apart(kernel(planes, sizes, sizes)[1].squeeze(1), list(map(len, rows)))
    return [row[place] for row, place in zip(rows, places)]


def _through_means(x: Tensor, output_size: Any) -> Tensor:
    """Parts that are all of a dim are its mean."""
    num = len(output_size)
    dims = [at - num for at, length in enumerate(output_size) if length == 1]
    out = x.mean(dims, keepdim=True)
    if len(dims) == num:
        return out
    return getattr(torch.ops.aten, f"adaptive_avg_pool{num}d").default(out, output_size)


def _through_maxima(x: Tensor, output_size: Any) -> tuple[Tensor, Tensor]:
    """The greatest of all positions, dim by dim; of equal ones, and of several
    NaN, the first (torch names the last NaN)."""
    (values, places), inner = x.max(-1, keepdim=True), x.shape[-1]
    for dim in range(-2, -len(output_size) - 1, -1):
        values, which = values.max(dim, keepdim=True)
        places = which * inner + places.gather(dim, which)
        inner *= x.shape[dim]
    return values, places


_PARTS = rule(_text, on_box=_on_box, tables=_tables, by_size=True, keeps=False)

PAGE = page(
    op("adaptive_avg_pool1d", _PARTS, compose=_through_means),
    *[op(f"adaptive_avg_pool{num}d _adaptive_avg_pool{num}d", _PARTS, compose=_through_means)
      for num in (2, 3)],
    *[op(f"adaptive_max_pool{num}d", _PARTS, compose=_through_maxima) for num in (1, 2, 3)],
)
