"""Which lanes a box needs, and the cheapest way to them.

Element i of a tensor (its place in row-major order) that takes w lanes has the lanes w*i to
w*i + w - 1. A box is then a list of *runs* of equal length: one, where only leading dims are cut,
and one for each row of a column shard. The integers depend on nothing but the lane, so how they
are come by is a matter of time alone: a call for each run, or all that lies between the runs too,
or single blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from weft.core.layout import Box
from weft.rng.philox import Key, blocks_in_a_row, blocks_of, blocks_on

__all__ = ["Piece", "Runs", "Starts", "lanes", "runs_of", "scaled"]

Starts = range | np.ndarray
"""Where runs begin: evenly spaced ones as a range, others as an array."""

_SHIFT = 3
_PER_BLOCK = 1 << _SHIFT

_CALL_NS, _LANE_NS, _COPY_NS = 2500.0, 1.4, 0.5
"""Of blocks in a row: a call, a lane, and taking one out of what lies between runs."""

_ARRAYS_NS, _BLOCK_NS, _WORDS_NS, _PICK_NS = 65000.0, 40.0, 32.0, 6.0
"""Of blocks anywhere: a call, a block, one of which one or two words are wanted, and taking a lane
from a place of its own."""

_MANY = 1 << 12
"""From so many runs of one offset, it pays to call for them alone: no words but theirs."""

_SPAN_LANES = 1 << 17
"""Of what lies between runs, as much is drawn at a time as stays in the cache."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some runs, or a part of one: rows `rows` and columns `start` to `stop` of all runs as a
    matrix. `starts` say where they begin, the columns left out already."""

    rows: slice
    start: int
    stop: int
    starts: Starts


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a box, in units of elements.

    Args:
        first: where the first one begins. length: of each.
        outer: for every dim before the cut one, how many there are, and how far apart.
    """

    first: int
    length: int
    outer: tuple[tuple[int, int], ...]

    @property
    def num(self) -> int:
        return math.prod([num for num, _ in self.outer])

    def pieces(self, limit: int) -> Iterator[Piece]:
        """All of them, in pieces of about `limit` elements, or fewer where runs are longer."""
        if self.num * self.length == 0:
            return
        if self.num == 1 and self.length <= limit:
            yield Piece(slice(0, 1), 0, self.length, range(self.first, self.first + 1))
            return
        if self.length >= limit:
            for row, start in enumerate(self.starts(0, self.num).tolist()):
                for at in range(0, self.length, limit):
                    stop = min(at + limit, self.length)
                    yield Piece(slice(row, row + 1), at, stop, range(start + at, start + at + 1))
            return
        each = limit // self.length
        num, step = self.outer[-1] if self.outer else (1, 1)
        even = num == self.num or num * self.length * 4 >= limit
        inner = num if even else self.num
        for base in range(0, self.num, inner):
            first = int(self.starts(base, base + 1)[0]) if even else 0
            for at in range(0, inner, each):
                count = min(each, inner - at)
                rows = slice(base + at, base + at + count)
                starts: Starts = self.starts(rows.start, rows.stop)
                if even:
                    begin = first + at * step
                    starts = range(begin, begin + count * step, step)
                yield Piece(rows, 0, self.length, starts)

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


def scaled(starts: Starts, each: int) -> Starts:
    """Where the lanes of runs begin, `each` an element."""
    if isinstance(starts, range):
        return range(starts.start * each, starts.stop * each, starts.step * each)
    return starts * each


def lanes(key: Key, sub: int, starts: Starts, count: int, device: torch.device) -> torch.Tensor:
    """`count` lanes from each of the `starts`, at least one: (len(starts), count), int32."""
    if device.type != "cpu":
        return _on_device(key, sub, _array(starts), count, device)
    if len(starts) == 1:
        return torch.from_numpy(_row(key, sub, int(starts[0]), count)).view(1, count)
    return torch.from_numpy(_on_cpu(key, sub, starts, count))


def _array(starts: Starts) -> np.ndarray:
    if isinstance(starts, range):
        return np.arange(starts.start, starts.stop, starts.step, dtype=np.int64)
    return starts


def _on_cpu(key: Key, sub: int, starts: Starts, count: int) -> np.ndarray:
    num, phases = len(starts), _num_phases(starts)
    offset = int(starts[0]) % _PER_BLOCK
    blocks = _num_blocks(offset, count) if phases == 1 else (_PER_BLOCK + count - 1) / _PER_BLOCK
    each = blocks * (_BLOCK_NS if blocks > 2 else _WORDS_NS)
    by_block = phases * _ARRAYS_NS + num * each
    if not phases:
        by_block = _ARRAYS_NS + num * (blocks * _BLOCK_NS + count * _PICK_NS)
    by_run = num * (_CALL_NS + count * _LANE_NS)
    span = int(starts[-1]) - int(starts[0]) + count
    by_span = 2 * _CALL_NS + span * _LANE_NS + num * count * _COPY_NS
    if by_block < min(by_run, by_span):
        return _scattered(key, sub, starts, count)
    return (_by_run if by_run < by_span else _by_span)(key, sub, starts, count)


def _row(key: Key, sub: int, start: int, count: int) -> np.ndarray:
    first, offset = divmod(start, _PER_BLOCK)
    num = _num_blocks(offset, count)
    return blocks_in_a_row(key, sub, first, num).view(np.int32)[offset : offset + count]


def _by_run(key: Key, sub: int, starts: Starts, count: int) -> np.ndarray:
    out = np.empty((len(starts), count), np.int32)
    for at, start in enumerate(starts):
        out[at] = _row(key, sub, int(start), count)
    return out


def _by_span(key: Key, sub: int, starts: Starts, count: int) -> np.ndarray:
    """All lanes from the first run to the last, some runs at a time."""
    out = np.empty((len(starts), count), np.int32)
    mean = max((int(starts[-1]) - int(starts[0])) // (len(starts) - 1), 1)
    num = max(_SPAN_LANES // mean, 1)
    for at in range(0, len(starts), num):
        some = starts[at : at + num]
        first = int(some[0])
        row = _row(key, sub, first, int(some[-1]) - first + count)
        if isinstance(some, range):
            _take_evenly(row, some.step, out[at : at + num])
        else:
            out[at : at + num] = row[(some - first)[:, None] + np.arange(count)]
    return out


_ITEMS = {1: np.int32, 2: np.int64, 4: np.complex128}


def _take_evenly(row: np.ndarray, step: int, out: np.ndarray) -> None:
    """Copy to `out` what begins every `step` lanes of a row, in the widest items that fit."""
    count = out.shape[1]
    width = math.gcd(4, count, step)
    item = _ITEMS[width]
    whole = row[: len(row) // width * width].view(item)
    strides = (step * row.itemsize, whole.itemsize)
    out.view(item)[...] = np.lib.stride_tricks.as_strided(
        whole, (len(out), count // width), strides
    )


def _num_blocks(offset: Any, count: int) -> Any:
    """How many blocks have `count` lanes from a place in the first one."""
    return (offset + (count + _PER_BLOCK - 1)) >> _SHIFT


def _num_phases(starts: Starts) -> int:
    """Into how many parts to divide runs so that those of one begin at one place of their first
    blocks; 0, where it does not pay."""
    if not isinstance(starts, range):
        return 0
    phases = _PER_BLOCK // math.gcd(_PER_BLOCK, starts.step)
    return phases if phases == 1 or len(starts) >= phases * _MANY else 0


def _scattered(key: Key, sub: int, starts: Starts, count: int) -> np.ndarray:
    """The blocks of each run by themselves, and no others: of one or two, the words needed."""
    phases = _num_phases(starts)
    if not phases:
        return _ragged(key, sub, _array(starts), count)
    if phases > 1:
        out = np.empty((len(starts), count), np.int32)
        for at in range(phases):
            out[at::phases] = _scattered(key, sub, starts[at::phases], count)
        return out
    offset = int(starts[0]) % _PER_BLOCK
    num, blocks = _num_blocks(offset, count), _array(starts) >> _SHIFT
    if num > 2:
        words = blocks_of(key, sub, blocks[:, None] + np.arange(num)).reshape(len(starts), -1)
        return words.view(np.int32)[:, offset : offset + count]
    first, end = offset // 2, (offset + count + 1) // 2
    parts = [blocks_of(key, sub, blocks, range(first, min(end, 4)))]
    if num == 2:
        parts.append(blocks_of(key, sub, blocks + 1, range(end - 4)))
    words = parts[0] if num == 1 else np.concatenate(parts, 1)
    return words.view(np.int32)[:, offset - 2 * first :][:, :count]


def _ragged(key: Key, sub: int, starts: np.ndarray, count: int) -> np.ndarray:
    """The same for runs that begin anywhere in their blocks."""
    firsts, offsets = starts >> _SHIFT, starts & (_PER_BLOCK - 1)
    nums = _num_blocks(offsets, count)
    least = int(nums.min())
    longer = np.flatnonzero(nums > least)  # by one
    blocks = firsts[:, None] + np.arange(least)
    every = blocks_of(key, sub, np.concatenate((blocks.reshape(-1), firsts[longer] + least)))
    row = every[: blocks.size].view(np.int32).reshape(len(starts), -1)
    if len(longer):
        wider = np.empty((len(starts), row.shape[1] + _PER_BLOCK), np.int32)
        wider[:, : row.shape[1]] = row
        wider[longer, row.shape[1] :] = every[blocks.size :].view(np.int32)
        row = wider
    return np.take_along_axis(row, offsets[:, None] + np.arange(count), 1)


def _on_device(
    key: Key, sub: int, starts: np.ndarray, count: int, device: torch.device
) -> torch.Tensor:
    num = int(_num_blocks(starts & (_PER_BLOCK - 1), count).max())
    firsts = torch.from_numpy(starts >> _SHIFT).to(device)
    blocks = firsts[:, None] + torch.arange(num, device=device)
    row = blocks_on(key, sub, blocks).view(len(starts), -1).view(torch.int32)
    offsets = starts & (_PER_BLOCK - 1)
    if (offsets == offsets[0]).all():
        return row[:, int(offsets[0]) : int(offsets[0]) + count]
    places = torch.from_numpy(offsets).to(device)[:, None] + torch.arange(count, device=device)
    return row.gather(1, places)
