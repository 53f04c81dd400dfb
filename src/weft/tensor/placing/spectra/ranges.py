"""Ranges of the elements of dims, which are kept of a tensor, and blocks of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core import Box
from weft.tensor.placing.waiting import items_of

__all__ = [
    "Range", "Ranges", "box_of", "count", "merged", "parts_of", "place_among", "rolled", "spread",
    "taken",
]

Range = tuple[int, int]
Ranges = Mapping[int, Sequence[Range]]
"""Of some dims, the elements that are kept, in their order."""


def box_of(shape: Sequence[int], index: Any) -> Box | None:
    """What `x[index]` reads of each dim; None if it is no box, an empty one, or out of bounds."""
    items = items_of(shape, index)
    if items is None or len(items) != len(shape):
        return None
    box: list[Range] = []
    for item, length in zip(items, shape):
        start, stop, step = item.indices(length) if isinstance(item, slice) else (
            item % length, item % length + 1, 1)
        if step != 1 or start >= stop or not (
            isinstance(item, slice) or -length <= item < length
        ):
            return None
        box.append((start, stop))
    return tuple(box)


def rolled(ends: Range, shift: int, length: int) -> list[Range]:
    """Where the elements of a range come to lie when their dim is rolled, in their order."""
    start = (ends[0] + shift) % length
    stop = start + ends[1] - ends[0]
    return [(start, stop)] if stop <= length else [(start, length), (0, stop - length)]


def merged(ranges: Sequence[Range]) -> list[Range]:
    """All that lies in some ranges, in order, as few of them."""
    out: list[Range] = []
    for start, stop in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(stop, out[-1][1])
        else:
            out.append((start, stop))
    return out


def count(ranges: Sequence[Range]) -> int:
    """How many elements they have."""
    return sum(stop - start for start, stop in ranges)


def place_among(ends: Range, kept: Sequence[Range]) -> Range:
    """Where a range lies among the elements that are kept."""
    at = 0
    for start, stop in kept:
        if start <= ends[0] < stop:
            return at + ends[0] - start, at + ends[1] - start
        at += stop - start
    raise AssertionError(ends, kept)


def taken(x: Tensor, kept: Ranges) -> Any:
    """These elements of some dims, and all of the others."""
    for dim, ranges in kept.items():
        if count(ranges) < x.shape[dim] or len(ranges) > 1:
            parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
            x = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return x


def parts_of(x: Any, dim: int, ranges: Sequence[Range]) -> list[tuple[Range, Any]]:
    """The parts of a tensor that these ranges are."""
    lengths = [stop - start for start, stop in ranges]
    return list(zip(ranges, x.split(lengths, dim) if len(ranges) > 1 else [x]))


def spread(x: Any, dim: int, ranges: Sequence[Range]) -> Any:
    """The elements at their places, with zeros between them, but none behind."""
    parts: list[Any] = []
    end = 0
    for (start, stop), part in parts_of(x, dim, ranges):
        if start > end:
            shape = [start - end if at == dim else length for at, length in enumerate(x.shape)]
            parts.append(x.new_zeros(shape))
        parts.append(part)
        end = stop
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
