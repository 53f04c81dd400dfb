"""Which lanes a box needs, and the cheapest way to them.

Element i of a tensor (its place in row-major order) that takes w lanes has the lanes w*i to
w*i + w - 1. A box is then a list of *runs* of equal length: one, where only leading dims are cut,
and one for each row of a column shard. The integers depend on nothing but the lane, so how they
are come by is a matter of time alone: a call for each run, or all that lies between the runs too,
or single blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from weft.core.layout import Box
from weft.rng.philox import Key, blocks_in_a_row, blocks_of, blocks_on

__all__ = ["lanes", "runs_of"]

_PER_BLOCK = 8

_CALL_NS, _LANE_NS, _SCATTERED_NS, _COPY_NS = 3500.0, 1.7, 11.0, 1.0
"""Of blocks in a row: a call, and a lane; a lane of blocks anywhere; taking a lane out."""

_CHUNK_LANES = 1 << 17
"""Of what lies between runs, as much is drawn at a time as stays in the cache."""


def runs_of(shape: Sequence[int], box: Box) -> tuple[np.ndarray, int]:
    """Where the runs of a box begin (elements, ascending), and how long each is."""
    last = max((at for at, side in enumerate(box) if side != (0, shape[at])), default=0)
    if not box:
        return np.zeros(1, np.int64), 1
    inner = math.prod(shape[last + 1 :])
    start, stop = box[last]
    starts = np.array([start * inner], np.int64)
    stride = inner * shape[last]
    for at in range(last - 1, -1, -1):
        first, past = box[at]
        steps = np.arange(first, past, dtype=np.int64) * stride
        starts = (steps[:, None] + starts).reshape(-1)
        stride *= shape[at]
    length = (stop - start) * inner
    return starts if length else starts[:0], length


def lanes(
    key: Key, sub: int, starts: np.ndarray, count: int, device: torch.device
) -> torch.Tensor:
    """`count` lanes from each of the `starts`: (len(starts), count), int32."""
    if not len(starts) or not count:
        return torch.empty((len(starts), count), dtype=torch.int32, device=device)
    if device.type == "cpu":
        if len(starts) == 1:
            return torch.from_numpy(_row(key, sub, int(starts[0]), count)).view(1, count)
        return torch.from_numpy(_on_cpu(key, sub, starts, count))
    return _on_device(key, sub, starts, count, device)


def _on_cpu(key: Key, sub: int, starts: np.ndarray, count: int) -> np.ndarray:
    between = int(starts[-1] - starts[0]) + count
    used = len(starts) * _num_blocks(starts, count) * _PER_BLOCK
    by_run = len(starts) * _CALL_NS + used * _LANE_NS
    by_span = between * _LANE_NS + len(starts) * count * _COPY_NS
    scattered = used * _SCATTERED_NS
    if scattered < min(by_run, by_span):
        return _scattered(key, sub, starts, count)
    return (_by_run if by_run < by_span else _by_span)(key, sub, starts, count)


def _num_blocks(starts: np.ndarray, count: int) -> int:
    """How many blocks the run needs that needs most."""
    return (int((starts % _PER_BLOCK).max()) + count + _PER_BLOCK - 1) // _PER_BLOCK


def _row(key: Key, sub: int, start: int, count: int) -> np.ndarray:
    first, offset = divmod(start, _PER_BLOCK)
    num = (offset + count + _PER_BLOCK - 1) // _PER_BLOCK
    return blocks_in_a_row(key, sub, first, num).view(np.int32)[offset : offset + count]


def _by_run(key: Key, sub: int, starts: np.ndarray, count: int) -> np.ndarray:
    out = np.empty((len(starts), count), np.int32)
    for at, start in enumerate(starts.tolist()):
        out[at] = _row(key, sub, start, count)
    return out


def _by_span(key: Key, sub: int, starts: np.ndarray, count: int) -> np.ndarray:
    """All lanes from the first run to the last, some runs at a time."""
    out = np.empty((len(starts), count), np.int32)
    mean = max(int(starts[-1] - starts[0]) // (len(starts) - 1), 1)
    num = max(_CHUNK_LANES // mean, 1)
    for at in range(0, len(starts), num):
        some = starts[at : at + num]
        first = int(some[0])
        row = _row(key, sub, first, int(some[-1]) - first + count)
        out[at : at + num] = _taken(row, some - first, count)
    return out


def _taken(row: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    steps = np.diff(places)
    if not len(steps) or (steps == steps[0]).all():
        step = int(steps[0]) if len(steps) else 0
        strides = (step * row.itemsize, row.itemsize)
        return np.lib.stride_tricks.as_strided(row[places[0] :], (len(places), count), strides)
    return row[places[:, None] + np.arange(count)]


def _scattered(key: Key, sub: int, starts: np.ndarray, count: int) -> np.ndarray:
    """The blocks of each run by themselves."""
    out = np.empty((len(starts), count), np.int32)
    num = _num_blocks(starts, count)
    blocks = np.arange(num)
    rows = max(_CHUNK_LANES // (num * _PER_BLOCK), 1)
    for at in range(0, len(starts), rows):
        some = starts[at : at + rows]
        found = blocks_of(key, sub, (some // _PER_BLOCK)[:, None] + blocks)
        row = found.reshape(-1).view(np.int32)
        places = np.arange(len(some)) * (num * _PER_BLOCK) + some % _PER_BLOCK
        out[at : at + rows] = _taken(row, places, count)
    return out


def _on_device(
    key: Key, sub: int, starts: np.ndarray, count: int, device: torch.device
) -> torch.Tensor:
    num = _num_blocks(starts, count)
    offsets = starts % _PER_BLOCK
    firsts = torch.from_numpy(starts // _PER_BLOCK).to(device)
    blocks = firsts[:, None] + torch.arange(num, device=device)
    row = blocks_on(key, sub, blocks).view(len(starts), -1).view(torch.int32)
    if (offsets == offsets[0]).all():
        return row[:, int(offsets[0]) : int(offsets[0]) + count]
    places = torch.from_numpy(offsets).to(device)[:, None] + torch.arange(count, device=device)
    return row.gather(1, places)
