"""The places of a box's elements: runs of the global tensor.

A box is a list of *runs* of equal length in row-major order: one run if only leading dims are
sharded, and one per row for a shard of columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from weft.core.layout import Box

__all__ = ["Piece", "Runs", "runs_of"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some runs, or a part of one: rows `rows` and columns `start` to `stop` of all runs as a
    matrix. `starts` (int64) are their beginnings, with omitted columns already counted."""

    rows: slice
    start: int
    stop: int
    starts: np.ndarray


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a box, in units of elements.

    Args:
        first: the beginning of the first run.
        length: the length of each run.
        outer: for every dim before the sharded one, the number of runs and their distance.
    """

    first: int
    length: int
    outer: tuple[tuple[int, int], ...]

    @property
    def num(self) -> int:
        return math.prod([num for num, _ in self.outer])

    def pieces(self, limit: int) -> Iterator[Piece]:
        """All of them, in pieces of about `limit` elements, or in parts if runs are longer."""
        if self.num * self.length == 0:
            return
        each = max(limit // self.length, 1)
        for row in range(0, self.num, each):
            rows = slice(row, min(row + each, self.num))
            starts = self.starts(rows.start, rows.stop)
            for at in range(0, self.length, limit):
                yield Piece(rows, at, min(at + limit, self.length), starts + at)

    def starts(self, begin: int, end: int) -> np.ndarray:
        """Where the runs of these numbers begin."""
        left = np.arange(begin, end, dtype=np.int64)
        found = np.full(len(left), self.first, np.int64)
        for num, step in reversed(self.outer):
            left, digit = np.divmod(left, num) if num < self.num else (left, left)
            found += digit * step
        return found


@lru_cache(maxsize=4096)
def runs_of(shape: tuple[int, ...], box: Box) -> Runs:
    """The runs of a box of a tensor."""
    last = max((at for at, side in enumerate(box) if side != (0, shape[at])), default=0)
    if not box:
        return Runs(0, 1, ())
    inner = math.prod(shape[last + 1 :])
    start, stop = box[last]
    first, stride = start * inner, inner * shape[last]
    outer: list[tuple[int, int]] = []
    for at in range(last - 1, -1, -1):
        begin, end = box[at]
        first += begin * stride
        outer.append((end - begin, stride))
        stride *= shape[at]
    return Runs(first, (stop - start) * inner, tuple(reversed(outer)))
