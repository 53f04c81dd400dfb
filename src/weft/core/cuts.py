"""How a length is cut into shards: offsets `0 = c0 <= c1 <= ... <= cm = n`.

The default applies `torch.chunk` recursively, axis by axis, major first (as torch's DTensor);
flat cuts take one ceiling over all axes (as XLA); balanced cuts differ by at most one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

__all__ = [
    "balanced_cuts", "cuts_from_sizes", "default_cuts", "default_interval", "flat_cuts",
]


def default_interval(length: int, sizes: Sequence[int], index: int) -> tuple[int, int]:
    """The interval of shard `index` (mixed radix over `sizes`) without listing the others."""
    start, stop = 0, length
    below = math.prod(sizes)
    for size in sizes:
        below //= size
        digit = index // below % size
        chunk = -(-(stop - start) // size)
        start, stop = min(start + digit * chunk, stop), min(start + (digit + 1) * chunk, stop)
    return start, stop


def default_cuts(length: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The default cuts of `length` over axes of `sizes`, major to minor.

    >>> default_cuts(5, (2, 2))
    (0, 2, 3, 4, 5)
    """
    cuts = [(0, length)]
    for size in sizes:
        cuts = [
            (min(start + digit * chunk, stop), min(start + (digit + 1) * chunk, stop))
            for start, stop in cuts
            for chunk in (-(-(stop - start) // size),)
            for digit in range(size)
        ]
    return (0, *(stop for _, stop in cuts))


def flat_cuts(length: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """One ceiling over all axes: 5 over 2x2 is 2, 2, 1, 0."""
    count = math.prod(sizes)
    chunk = -(-length // count)
    return tuple(min(index * chunk, length) for index in range(count + 1))


def balanced_cuts(length: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes that differ by at most one, the larger first: 5 over 4 is 2, 1, 1, 1."""
    count = math.prod(sizes)
    whole, more = divmod(length, count)
    return tuple(index * whole + min(index, more) for index in range(count + 1))


def cuts_from_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Offsets of shards that follow one another."""
    return (0, *accumulate(sizes))
