"""Fractional max pools: random numbers decide where windows lie, within bounds.

For a number `u` of 0 to 1, the window of place `o` of `m` starts at int((o + u) a) - int(u a), with
a = (n - k) / (m - 1) for `n` positions and a kernel of `k`; the last one ends the dim (torch's
`FractionalMaxPooling.h`). So it starts at the place int(o a) or the next one, whatever `u` is.
So layouts alone decide what a rank may read: one row more than any one set of numbers needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.convolutions import each_of, num_positions
from weft.ops.places import taken
from weft.ops.precision import widened
from weft.rules import Boxed, BoxedDim, Call, OnRank, Table, op, page, rule

__all__ = ["PAGE"]


def _kernel(call: Call) -> tuple[int, ...]:
    return each_of(call.get("kernel_size"), num_positions(call), 1)


def _text(call: Call, wants_grad: Sequence[bool]) -> str:
    """Positions by a table of what each may read: of images, "b c>0 @y0 @y1, b c 2 -> b c y0 y1, b
    c y0 y1"."""
    num = num_positions(call)
    batch, one = ("", "1 ") if len(call.tensors[0].shape) == num + 1 else ("b ", "b ")
    windows = " ".join([f"@y{at}" for at in range(num)])
    made = f"{batch}c {' '.join([f'y{at}' for at in range(num)])}"
    return f"{batch}c>0 {windows}, {one}c {num} -> {made}, {made}"


def _tables(call: Call) -> Mapping[str, Table]:
    num, (x, _) = num_positions(call), call.tensors
    # A start is rounded in this dtype: by that much of all places it may lie elsewhere.
    eps = 4 * torch.finfo(getattr(torch, x.dtype)).eps
    lengths = zip(x.shape[-num:], call.results[0].shape[-num:], _kernel(call))
    return {f"y{at}": _table(*each, eps * each[0]) for at, each in enumerate(lengths)}


def _table(before: int, after: int, kernel: int, off: float) -> Table:
    """The interval that each place may read of a dim, if starts are `off` by as many places."""
    last, step = before - kernel, (before - kernel) / max(after - 1, 1)
    starts = [max(math.floor(place * step - off), 0) for place in range(after - 1)]
    stops = [min(math.floor(place * step + off) + 1, last) + kernel for place in range(after - 1)]
    return Table((*starts, last), (*stops, before), before)


def _on_box(call: Call, boxed: Boxed) -> OnRank:
    """The greatest element of each window, by torch's numbers."""
    kernel, after = _kernel(call), call.results[0].shape[-num_positions(call) :]
    origins = [dim.box[0] if dim.box else 0 for dim in boxed.dims]
    lengths = [dim.length for dim in boxed.dims]

    def pool(x: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        starts = _starts(x, samples.detach(), boxed.dims, kernel, after)
        taps = _greatest(x.detach(), starts, kernel)
        places = _places(taps, kernel, [
            start + origin for start, origin in zip(starts, origins)], lengths)
        count = math.prod(x.shape[: -len(kernel)])
        mine = torch.arange(count, device=x.device).view(*taps.shape[: -len(kernel)])
        local = _places(taps, kernel, starts, x.shape[-len(kernel) :], mine).view(-1)
        return taken(x, local).view(taps.shape), places

    return pool, (boxed.args[0], boxed.args[3]), {}


def _starts(
    x: Tensor, samples: Tensor, dims: Sequence[BoxedDim], kernel: Sequence[int],
    after: Sequence[int],
) -> list[Tensor]:
    """Per dim, where the windows of each sample and channel start in the box, rounded as torch's
    kernels round."""
    samples = samples.reshape(*x.shape[: -len(dims)], len(dims))
    if samples.is_cuda:
        samples = widened(samples)
    found = []
    for at, (dim, taps, length) in enumerate(zip(dims, kernel, after)):
        last, (first, stop) = dim.length - taps, dim.outputs
        # Of an image, the first number is the width's.
        sample = samples[..., [1 - at if len(dims) == 2 else at]]
        place = torch.arange(first, stop, device=x.device)
        step = sample.new_tensor(last) / sample.new_tensor(max(length - 1, 1))
        start = ((place.to(step.dtype) + sample) * step).long() - (sample * step).long()
        start = start.masked_fill(place == length - 1, last)
        low, high = dim.box or (0, dim.length)
        found.append((start - low).clamp(0, high - low - taps))
    return found


def _greatest(x: Tensor, starts: Sequence[Tensor], kernel: Sequence[int]) -> Tensor:
    """Of each window the tap with its greatest element, of equal ones the first, of several NaN
    the last one."""
    taps = _taps(x, starts, kernel)
    best = next(taps)
    which = torch.zeros_like(best, dtype=torch.int32)
    for tap, seen in enumerate(taps, 1):
        better = (seen > best).logical_or_(seen.isnan())
        best = torch.where(better, seen, best)
        which.masked_fill_(better, tap)
    return which


def _places(
    taps: Tensor, kernel: Sequence[int], starts: Sequence[Tensor], lengths: Sequence[int],
    lead: Tensor | None = None,
) -> Tensor:
    """Where taps of windows are in dims of these lengths, counted over all of them; behind
    `lead` other such dims."""
    num = len(kernel)
    places = torch.zeros_like(taps, dtype=torch.long)
    if lead is not None:
        places += lead[(..., *[None] * num)]
    for at, (start, length) in enumerate(zip(starts, lengths)):
        places *= length
        places += _along(start, at, num)
        places += taps // math.prod(kernel[at + 1 :]) % kernel[at]
    return places


def _taps(
    x: Tensor, starts: Sequence[Tensor], kernel: Sequence[int], at: int = 0
) -> Iterator[Tensor]:
    """The elements of all windows, tap by tap, of which dims before `at` have been read."""
    if at == len(kernel):
        yield x
        return
    start, dim = _along(starts[at], at, len(kernel)), x.dim() - len(kernel) + at
    for tap in range(kernel[at]):
        rows = (start + tap).expand(*x.shape[:dim], -1, *x.shape[dim + 1 :])
        yield from _taps(x.gather(dim, rows), starts, kernel, at + 1)


def _along(start: Tensor, at: int, num: int) -> Tensor:
    """Starts along the dim `at` of `num` dims of positions, in front of the others' lengths."""
    return start[(..., *[slice(None) if at == other else None for other in range(num)])]


def _drawn(function: Any, count: int, indices: bool = False) -> Callable[..., Any]:
    """`function` on random numbers that have the layout of the tensor."""

    def run(
        input: Tensor, kernel_size: Any, output_size: Any = None, output_ratio: Any = None,
        return_indices: bool = False, _random_samples: Tensor | None = None,
    ) -> Any:
        """The numbers that it draws have the tensor's layout."""
        if _random_samples is None and input.dim() > count:
            lead = (1, *input.shape[:-count])[-2:]
            _random_samples = input.new_empty((*lead, count)).uniform_()
        out = function(
            input, kernel_size, output_size, output_ratio, _random_samples=_random_samples
        )
        return out if return_indices or indices else out[0]

    return run


PAGE = page(
    op("fractional_max_pool2d fractional_max_pool3d",
       rule(_text, on_box=_on_box, tables=_tables, keeps=False)),
    *[op(f"torch.nn.functional.fractional_max_pool{n}d{suffix}", compose=_drawn(
          getattr(F, f"fractional_max_pool{n}d_with_indices"), n, bool(suffix)))
      for n in (2, 3) for suffix in ("", "_with_indices")],
)
