"""Lanes without a C compiler: numpy's generator, and arrays of blocks.

numpy's generator takes 11 ns a block, but only for consecutive blocks; arrays of counters take 35
to 40 ns, or 30 if only one or two words of a block are wanted. So there are three ways to draw
runs: a call for each run, or everything between them too, or single blocks. The cheapest is taken.
"""

from __future__ import annotations

import math

import numpy as np

from weft.rng.philox import LANES, Key, blocks_in_a_row, blocks_of, num_blocks
from weft.rng.runs import Starts, array_of

__all__ = ["lanes_in_numpy"]

_CALL_NS, _LANE_NS, _COPY_NS = 2500.0, 1.4, 0.5
"""For consecutive blocks: a call, a lane, and extracting one from what lies between runs."""

_ARRAYS_NS, _BLOCK_NS, _WORDS_NS, _PICK_NS = 65000.0, 40.0, 32.0, 6.0
"""For any blocks: a call, a block, a block of which one or two words are wanted, and picking a lane
from its own place."""

_MANY = 1 << 12
"""From this many runs with one offset, a separate call for them pays off: it draws only their
words."""

_SPAN_LANES = 1 << 17
"""Lanes between runs that are drawn at a time, so that they stay in the cache."""


def lanes_in_numpy(key: Key, sub: int, starts: Starts, count: int) -> np.ndarray:
    """`count` lanes from each of the `starts`: (len(starts), count), int32."""
    if len(starts) == 1:
        return _row(key, sub, int(starts[0]), count).reshape(1, count)
    num, phases = len(starts), _num_phases(starts)
    offset = int(starts[0]) % LANES
    blocks = num_blocks(offset, count) if phases == 1 else (LANES + count - 1) / LANES
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
    first, offset = divmod(start, LANES)
    num = num_blocks(offset, count)
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


def _num_phases(starts: Starts) -> int:
    """Into how many parts to divide runs so that those of one begin at the same place of their
    first blocks; 0 if it does not pay off."""
    if not isinstance(starts, range):
        return 0
    phases = LANES // math.gcd(LANES, starts.step)
    return phases if phases == 1 or len(starts) >= phases * _MANY else 0


def _scattered(key: Key, sub: int, starts: Starts, count: int) -> np.ndarray:
    """Exactly the blocks of each run; of one or two blocks, only the needed words."""
    phases = _num_phases(starts)
    if not phases:
        return _ragged(key, sub, array_of(starts), count)
    if phases > 1:
        out = np.empty((len(starts), count), np.int32)
        for at in range(phases):
            out[at::phases] = _scattered(key, sub, starts[at::phases], count)
        return out
    offset = int(starts[0]) % LANES
    num, blocks = num_blocks(offset, count), array_of(starts) // LANES
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
    firsts, offsets = starts // LANES, starts % LANES
    nums = num_blocks(offsets, count)
    least = int(nums.min())
    longer = np.flatnonzero(nums > least)  # by one
    blocks = firsts[:, None] + np.arange(least)
    every = blocks_of(key, sub, np.concatenate((blocks.reshape(-1), firsts[longer] + least)))
    row = every[: blocks.size].view(np.int32).reshape(len(starts), -1)
    if len(longer):
        wider = np.empty((len(starts), row.shape[1] + LANES), np.int32)
        wider[:, : row.shape[1]] = row
        wider[longer, row.shape[1] :] = every[blocks.size :].view(np.int32)
        row = wider
    return np.take_along_axis(row, offsets[:, None] + np.arange(count), 1)
