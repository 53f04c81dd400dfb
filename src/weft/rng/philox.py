"""Philox 4x64-10: 256 bits from a key and a counter, without any state.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the constants
are Random123's. A *block* is the output for one counter: four 64-bit words, or eight 32-bit
*lanes*, the low half of a word first. Block b of substream s under a key has the counter (b + 1, s,
0, 0).

Four implementations give the same integers. _lanes.c is for CPUs (6 ns a block). The others are
here and need no compiler: numpy's generator in C, for consecutive blocks (11 ns a block); arrays of
counters in numpy, for any blocks (35 to 40 ns, 30 for a word or two); and torch's integer ops,
on any device. Neither array implementation has the high half of a 64-bit product, so both multiply
32-bit halves; torch has no logical shift either.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

__all__ = [
    "LANES", "Key", "blocks_in_a_row", "blocks_of", "blocks_on", "num_blocks", "philox",
    "philox_torch",
]

Key = tuple[int, int]
"""Two 64-bit numbers: here, the seed and the number of the call."""

LANES = 8
"""Lanes in a block."""

_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_NUM_ROUNDS = 10
_LOW, _WORD = (1 << 32) - 1, (1 << 64) - 1

_ARRAY = np.uint64
_CHUNK_BLOCKS = 1 << 14
"""How many blocks an array implementation handles at once: temporaries stay in the cache."""


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


def blocks_of(
    key: Key, sub: int, blocks: np.ndarray, words: Sequence[int] = range(4)
) -> np.ndarray:
    """These words of the blocks of these numbers (int64, any shape): (*shape, words), uint64."""
    flat = blocks.reshape(-1).astype(_ARRAY)
    out = np.empty((len(flat), len(words)), _ARRAY)
    for start in range(0, len(flat), _CHUNK_BLOCKS):
        piece = flat[start : start + _CHUNK_BLOCKS] + _ARRAY(1)
        for place, word in enumerate(philox((piece, sub, 0, 0), key, words)):
            out[start : start + len(piece), place] = word
    return out.reshape(*blocks.shape, len(words))


def blocks_on(key: Key, sub: int, blocks: torch.Tensor) -> torch.Tensor:
    """The same on the device of `blocks` (int64): (*shape, 4), the words as int64."""
    flat = blocks.reshape(-1)
    parts = []
    for piece in flat.split(_CHUNK_BLOCKS if flat.device.type == "cpu" else 1 << 21):
        zero = torch.zeros_like(piece)
        words = philox_torch((piece + 1, torch.full_like(piece, sub), zero, zero), key)
        parts.append(torch.stack(words, -1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*blocks.shape, 4)


Word = np.ndarray | int
"""A word of many counters (uint64); an int if it is the same in all of them."""

_FROM = (1, 2), (2,), (0, 3), (0,)
"""Which words of one round a word of the next depends on."""


@lru_cache
def _wanted(words: tuple[int, ...]) -> list[set[int]]:
    """Which words each round has to compute so that the last one gives these."""
    wanted = [set(words)]
    while len(wanted) < _NUM_ROUNDS:
        wanted.append({before for word in wanted[-1] for before in _FROM[word]})
    return wanted[::-1]


def philox(
    counter: tuple[Word, ...], key: Key, words: Sequence[int] = range(4)
) -> tuple[Any, ...]:
    """The function itself on arrays: four counter words to four words, or some of them.

    What is the same for all counters is computed once, and what the requested words do not depend
    on is omitted: counters with two constant words save two products of twenty, a single word saves
    two to four more.
    """
    now = list(counter)
    for number, wanted in enumerate(_wanted(tuple(words))):
        after: list[Word] = [0, 0, 0, 0]
        for half, subkey in enumerate(_key_of(key, number)):
            high, low = 2 * half, 2 * half + 1
            if high in wanted or low in wanted:
                after[high], after[low] = _half(
                    now[2 - high], now[low], 1 - half, subkey, high in wanted
                )
        now = after
    return tuple([now[word] for word in words])


def _key_of(key: Key, number: int) -> Key:
    """The key of a round."""
    first, second = (word + number * step & _WORD for word, step in zip(key, _WEYL))
    return first, second


def _half(x: Word, mask: Word, which: int, subkey: int, is_high: bool) -> tuple[Word, Word]:
    """Half a round: the high half of x's product with a multiplier m, xor the mask and the key, if
    it is wanted; and the low half.

    With m' = 2^64 - m, x m = x 2^64 - x m', so the high half is x - k, k = (x m' + p) / 2^64, where
    p is the low one. m' = u 2^32 + v is so small that s = u x_low + v x_high, with the halves of x,
    fits into 64 bits; and s = u x + (v - u 2^32) x_high, which needs no mask. As x m' = u x_high
    2^64 + s 2^32 + v x_low, k = u x_high + (s + (p + v x_low) / 2^32) / 2^32: what s + (p >> 32)
    lacks to a multiple of 2^32 is v + 1 at most, so 2^32 - 1 is added and all below shifted out.
    """
    if isinstance(x, int):
        high, low = divmod(x * _MULTIPLIERS[which], 1 << 64)
        high ^= subkey
        return (high ^ mask if isinstance(mask, int) else mask ^ _word(high)), low
    multiplier, upper, across = _FACTORS[which]
    low = x * multiplier
    if not is_high:
        return 0, low
    x_high = x >> _SHIFT
    found = x * upper
    found += x_high * across
    found += low >> _SHIFT
    found += _UP
    found >>= _SHIFT
    x_high *= upper
    found += x_high
    np.subtract(x, found, found)
    if isinstance(mask, int):
        subkey ^= mask
    else:
        found ^= mask
    found ^= _word(subkey)
    return found, low


def _word(number: int) -> np.ndarray:
    """A number as a 0-d array, which ufuncs take in half the time."""
    return np.array(number & _WORD, _ARRAY)


_SHIFT, _UP = _word(32), _word(_LOW)

_FACTORS = [
    (_word(m), _word(-m >> 32), _word((-m & _LOW) - (-m >> 32 << 32))) for m in (
        _MULTIPLIERS[0] - (1 << 64), _MULTIPLIERS[1] - (1 << 64)
    )
]
"""Of each multiplier: itself, u, and v - u 2^32."""


def philox_torch(counter: tuple[torch.Tensor, ...], key: Key) -> tuple[torch.Tensor, ...]:
    """The function itself on int64 tensors, whose sums and products wrap as unsigned ones do."""
    first, second = key
    a, b, c, d = counter
    for _ in range(_NUM_ROUNDS):
        low0, low1 = a * _signed(_MULTIPLIERS[0]), c * _signed(_MULTIPLIERS[1])
        high0, high1 = _high_torch(a, _MULTIPLIERS[0]), _high_torch(c, _MULTIPLIERS[1])
        high1 = high1.bitwise_xor_(b).bitwise_xor_(_signed(first))
        high0 = high0.bitwise_xor_(d).bitwise_xor_(_signed(second))
        a, b, c, d = high1, low1, high0, low0
        first, second = (first + _WEYL[0]) & _WORD, (second + _WEYL[1]) & _WORD
    return a, b, c, d


def _high_torch(x: torch.Tensor, multiplier: int) -> torch.Tensor:
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
