"""The lanes of runs: 32-bit parts of Philox blocks, each determined by its number alone.

Element i of a tensor with w lanes per element has the lanes w*i to w*i + w - 1. How they are
computed affects only the time. On the CPU compiled code (_lanes.c) computes exactly the blocks that
runs touch, 6 ns each. If weft was built without a C compiler, numpy's generator computes them in
rows, 11 ns a block, with what lies between short runs. On other devices torch's integer ops do, and
for short runs that lie far apart.
"""

from __future__ import annotations

import numpy as np
import torch

from weft.rng.philox import LANES, Key, blocks_in_a_row, blocks_on, num_blocks

try:
    from weft.rng import _lanes as compiled
except ImportError:
    compiled = None

__all__ = ["lanes"]

_FEW = 1 << 16
"""The most lanes that are computed for tensors without memory; a dry run keeps their values."""

_ROW = 1 << 13
"""How many lanes numpy's generator computes in the time of a few calls."""

_SHORT, _APART = 1 << 8, 16
"""torch's ops are faster for runs up to this length, with gaps so many times as long."""


def lanes(
    key: Key, sub: int, starts: np.ndarray, count: int, device: torch.device
) -> torch.Tensor:
    """`count` lanes from each of the `starts`, at least one: (len(starts), count), int32."""
    if device.type == "meta":
        if len(starts) * count > _FEW:
            return torch.empty((len(starts), count), dtype=torch.int32, device=device)
        return lanes(key, sub, starts, count, torch.device("cpu")).to(device)
    if device.type != "cpu" or (
        compiled is None and count < _SHORT and _APART * (count + LANES) < _distance(starts)
    ):
        return _on_device(key, sub, starts, count, device)
    out = np.empty((len(starts), count), np.int32)
    (_in_rows if compiled is None else compiled.fill)(out, starts, key, sub)
    return torch.from_numpy(out)


def _in_rows(out: np.ndarray, starts: np.ndarray, key: Key, sub: int) -> None:
    """Fill `out` by rows of consecutive blocks, each of which has one run, or several that are
    close to each other. They ascend."""
    count = out.shape[1]
    each = max(_ROW // max(_distance(starts), 1), 1)
    for at in range(0, len(starts), each):
        some = starts[at : at + each]
        first, offset = divmod(int(some[0]), LANES)
        words = blocks_in_a_row(
            key, sub, first, num_blocks(offset, int(some[-1] - some[0]) + count))
        row = words.view(np.int32)[offset:]
        out[at : at + each] = row[:count] if each == 1 else (
            row[(some - some[0])[:, None] + np.arange(count)])


def _distance(starts: np.ndarray) -> int:
    return int(starts[-1] - starts[0]) // max(len(starts) - 1, 1)


def _on_device(
    key: Key, sub: int, starts: np.ndarray, count: int, device: torch.device
) -> torch.Tensor:
    num = int(num_blocks(starts % LANES, count).max())
    firsts = torch.from_numpy(starts // LANES).to(device)
    blocks = firsts[:, None] + torch.arange(num, device=device)
    row = blocks_on(key, sub, blocks).view(len(starts), -1).view(torch.int32)
    offsets = starts % LANES
    if (offsets == offsets[0]).all():
        return row[:, int(offsets[0]) : int(offsets[0]) + count]
    places = torch.from_numpy(offsets).to(device)[:, None] + torch.arange(count, device=device)
    return row.gather(1, places)
