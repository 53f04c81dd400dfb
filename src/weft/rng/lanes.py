"""The lanes of runs: 32-bit parts of Philox blocks, each determined by its number alone.

Element i of a tensor with w lanes per element has the lanes w*i to w*i + w - 1. How they are
computed affects only the time. On the CPU compiled code (_lanes.c) computes exactly the blocks that
runs touch, 6 ns each; if weft was built without a C compiler, numpy does. On other devices torch's
integer ops do.
"""

from __future__ import annotations

import numpy as np
import torch

from weft.rng.lanes_in_numpy import lanes_in_numpy
from weft.rng.philox import LANES, Key, blocks_on, num_blocks
from weft.rng.runs import Starts, array_of

try:
    from weft.rng import _lanes as compiled
except ImportError:
    compiled = None

__all__ = ["lanes"]

_FEW = 1 << 16
"""So many are computed for tensors without memory: a dry run keeps their values."""


def lanes(key: Key, sub: int, starts: Starts, count: int, device: torch.device) -> torch.Tensor:
    """`count` lanes from each of the `starts`, at least one: (len(starts), count), int32."""
    if device.type == "meta":
        if len(starts) * count > _FEW:
            return torch.empty((len(starts), count), dtype=torch.int32, device=device)
        return lanes(key, sub, starts, count, torch.device("cpu")).to(device)
    if device.type != "cpu":
        return _on_device(key, sub, array_of(starts), count, device)
    if compiled is None:
        return torch.from_numpy(lanes_in_numpy(key, sub, starts, count))
    out = np.empty((len(starts), count), np.int32)
    compiled.fill(out, array_of(starts), key, sub)
    return torch.from_numpy(out)


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
