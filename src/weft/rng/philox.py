"""Philox 4x64-10: 256 bits from a key and a counter, without any state.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the constants
are Random123's. A *block* is the output for one counter: four 64-bit words, or eight 32-bit
*lanes*, the low half of a word first. Block b of substream s under a key has the counter (b + 1, s,
0, 0).

Three implementations give the same integers. _lanes.c is for CPUs (6 ns a block). The others are
here and need no compiler: numpy's generator in C, for consecutive blocks (11 ns a block), and
torch's integer ops, for any blocks on any device (30 to 40 ns on a CPU). torch has neither the high
half of a 64-bit product, which is made of those of 32-bit halves, nor a logical shift.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

__all__ = ["LANES", "Key", "blocks_in_a_row", "blocks_on", "num_blocks", "philox"]

Key = tuple[int, int]
"""Two 64-bit numbers: here, the seed and the number of the call."""

LANES = 8
"""Lanes in a block."""

_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_NUM_ROUNDS = 10
_LOW, _WORD = (1 << 32) - 1, (1 << 64) - 1

_CHUNK_BLOCKS = 1 << 14
"""How many blocks are computed at once on a CPU: temporaries stay in the cache."""


class _Generators(threading.local):
    """numpy's generator and the state to set it to: one per thread."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=[0, 0])
        self.state: Any = self.bits.state
        self.counter, self.key = self.state["state"]["counter"], self.state["state"]["key"]


_local = _Generators()


def num_blocks(offset: Any, count: int) -> Any:
    """The number of blocks that contain `count` lanes from a place in the first one."""
    return (offset + (count + LANES - 1)) // LANES


def blocks_in_a_row(key: Key, sub: int, first: int, count: int) -> np.ndarray:
    """The words of blocks `first` to `first + count - 1`, flat (uint64)."""
    here = _local
    here.key[:] = key
    here.counter[:] = (first, sub, 0, 0)  # numpy increments before it draws
    here.bits.state = here.state
    return here.bits.random_raw(4 * count)


def blocks_on(key: Key, sub: int, blocks: torch.Tensor) -> torch.Tensor:
    """The words of the blocks of these numbers (int64), on their device: (*shape, 4), int64."""
    flat = blocks.reshape(-1)
    parts = []
    for piece in flat.split(_CHUNK_BLOCKS if flat.device.type == "cpu" else 1 << 21):
        zero = torch.zeros_like(piece)
        words = philox((piece + 1, torch.full_like(piece, sub), zero, zero), key)
        parts.append(torch.stack(words, -1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*blocks.shape, 4)


def philox(counter: tuple[torch.Tensor, ...], key: Key) -> tuple[torch.Tensor, ...]:
    """The function itself on int64 tensors, whose sums and products wrap as unsigned ones do."""
    first, second = key
    a, b, c, d = counter
    for _ in range(_NUM_ROUNDS):
        low0, low1 = a * _signed(_MULTIPLIERS[0]), c * _signed(_MULTIPLIERS[1])
        high0, high1 = _high(a, _MULTIPLIERS[0]), _high(c, _MULTIPLIERS[1])
        high1 = high1.bitwise_xor_(b).bitwise_xor_(_signed(first))
        high0 = high0.bitwise_xor_(d).bitwise_xor_(_signed(second))
        a, b, c, d = high1, low1, high0, low0
        first, second = (first + _WEYL[0]) & _WORD, (second + _WEYL[1]) & _WORD
    return a, b, c, d


def _high(x: torch.Tensor, multiplier: int) -> torch.Tensor:
    low, high = multiplier & _LOW, multiplier >> 32
    x_low, x_high = x.bitwise_and(_LOW), _shifted_(x >> 32)
    middle = _shifted_((x_low * low).bitwise_right_shift_(32)).add_(x_high * low)
    x_low = x_low.mul_(high).add_(middle.bitwise_and(_LOW))
    x_high = x_high.mul_(high).add_(_shifted_(middle.bitwise_right_shift_(32)))
    return x_high.add_(_shifted_(x_low.bitwise_right_shift_(32)))


def _shifted_(x: torch.Tensor) -> torch.Tensor:
    """A right shift by 32 that was arithmetic, made logical."""
    return x.bitwise_and_(_LOW)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
