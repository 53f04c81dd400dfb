"""Philox 4x64-10: 256 bits from a key and a counter, without any state.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the constants
are Random123's. A *block* is what one counter gives: four 64-bit words, or eight 32-bit *lanes*,
the low half of a word first. Block b of substream s under a key has the counter (b + 1, s, 0, 0).

The same integers come out of three bodies: numpy's generator in C, for blocks in a row (1.6 ns a
lane); arrays of counters in numpy, for blocks anywhere (about 7 ns); and torch's integer ops, on
whichever device. Neither array body has the high half of a 64-bit product, so both multiply 32-bit
halves; torch has no logical shift either.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

__all__ = ["Key", "blocks_in_a_row", "blocks_of", "blocks_on", "philox", "philox_torch"]

Key = tuple[int, int]
"""Two 64-bit numbers: here, the seed and the number of the call."""

_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_NUM_ROUNDS = 10
_LOW, _WORD = (1 << 32) - 1, (1 << 64) - 1

_ARRAY = np.uint64
_CHUNK_BLOCKS = 1 << 14
"""How many blocks an array body treats at once: temporaries stay in the cache."""


class _Generators(threading.local):
    """numpy's generator and the state to set it to: one of each thread."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=[0, 0])
        self.state: Any = self.bits.state
        self.counter, self.key = self.state["state"]["counter"], self.state["state"]["key"]


_local = _Generators()


def blocks_in_a_row(key: Key, sub: int, first: int, count: int) -> np.ndarray:
    """The words of blocks `first` to `first + count - 1`, flat (uint64)."""
    here = _local
    here.key[:] = key
    here.counter[:] = (first, sub, 0, 0)  # numpy counts up before it draws
    here.bits.state = here.state
    return here.bits.random_raw(4 * count)


def blocks_of(key: Key, sub: int, blocks: np.ndarray) -> np.ndarray:
    """The words of the blocks of these numbers (int64, of any shape): (*shape, 4), uint64."""
    flat = blocks.reshape(-1).astype(_ARRAY)
    out = np.empty((len(flat), 4), _ARRAY)
    for start in range(0, len(flat), _CHUNK_BLOCKS):
        piece = flat[start : start + _CHUNK_BLOCKS] + _ARRAY(1)
        for place, word in enumerate(philox(_after_two(piece, sub, key), key, 2)):
            out[start : start + len(piece), place] = word
    return out.reshape(*blocks.shape, 4)


def _after_two(x: np.ndarray, sub: int, key: Key) -> tuple[np.ndarray, ...]:
    """The counters (x, sub, 0, 0) after two rounds: half of their words are the same for all x."""
    (_, second), (third, fourth) = key, _key_of(key, 1)
    product = (sub ^ key[0]) * _MULTIPLIERS[0]
    a, c, low, high = _like(x)
    _high(x, 0, c, low, high)
    c ^= _ARRAY(second ^ _WORD)
    d = x * _ARRAY(_MULTIPLIERS[0])
    _high(c, 1, a, low, high)
    a ^= _ARRAY(third ^ _WORD)
    d ^= _ARRAY((product >> 64) ^ fourth)
    low.fill(product & _WORD)
    return a, c * _ARRAY(_MULTIPLIERS[1]), d, low


def blocks_on(key: Key, sub: int, blocks: torch.Tensor) -> torch.Tensor:
    """The same on the device of `blocks` (int64): (*shape, 4), the words as int64."""
    flat = blocks.reshape(-1)
    parts = []
    for piece in flat.split(_CHUNK_BLOCKS if flat.device.type == "cpu" else 1 << 21):
        zero = torch.zeros_like(piece)
        words = philox_torch((piece + 1, torch.full_like(piece, sub), zero, zero), key)
        parts.append(torch.stack(words, -1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*blocks.shape, 4)


def philox(counter: tuple[np.ndarray, ...], key: Key, start: int = 0) -> tuple[np.ndarray, ...]:
    """The function itself on arrays of uint64: four counter words to four words.

    Args:
        start: how many rounds have been done. The arrays are then written to.
    """
    a, b, c, d = counter if start else [word.copy() for word in counter]
    e, f, low, high = _like(a)
    for number in range(start, _NUM_ROUNDS):
        first, second = _key_of(key, number)
        _high(c, 1, e, low, high)
        _high(a, 0, f, low, high)
        np.bitwise_xor(e, b, e)
        np.bitwise_xor(f, d, f)
        np.bitwise_xor(e, _ARRAY(first ^ _WORD), e)
        np.bitwise_xor(f, _ARRAY(second ^ _WORD), f)
        np.multiply(c, _ARRAY(_MULTIPLIERS[1]), b)
        np.multiply(a, _ARRAY(_MULTIPLIERS[0]), d)
        a, c, e, f = e, f, a, c
    return a, b, c, d


def _like(x: np.ndarray) -> list[np.ndarray]:
    """Four arrays of its shape, to be written to."""
    return [np.empty_like(x) for _ in range(4)]


def _key_of(key: Key, number: int) -> Key:
    """The key of a round."""
    first, second = (word + number * step & _WORD for word, step in zip(key, _WEYL))
    return first, second


_SHIFT, _LOW_MASK = _ARRAY(32), _ARRAY(_LOW)

_PARTS = [(_ARRAY(-each & _LOW), _ARRAY((-each & _WORD) >> 32)) for each in _MULTIPLIERS]
"""The halves of 2^64 less each multiplier."""


def _high(
    x: np.ndarray, which: int, out: np.ndarray, low: np.ndarray, high: np.ndarray
) -> None:
    """To `out` the complement of the high half of the product of x with a multiplier m.

    x m = x 2^64 - x (2^64 - m), so for x > 0 it is the high half of x (2^64 - m), less x; and
    2^64 - m is so small that the sum of its products with the halves of x fits into 64 bits. To be
    a complement costs nothing: the key of the round is one, too. `low` and `high` are scratch.
    """
    part, upper = _PARTS[which]
    np.bitwise_and(x, _LOW_MASK, low)
    np.right_shift(x, _SHIFT, high)
    np.multiply(low, part, out)
    np.right_shift(out, _SHIFT, out)
    np.multiply(low, upper, low)
    np.add(out, low, out)
    np.multiply(high, part, low)
    np.add(out, low, out)
    np.right_shift(out, _SHIFT, out)
    np.multiply(high, upper, high)
    np.add(out, high, out)
    np.subtract(out, x, out)
    if x.size and not x.min():
        out[x == 0] = _WORD


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
