"""Ways to cut a length into shards: offsets `0 = c0 <= c1 <= ... <= cm = n`.

The default applies `torch.chunk` recursively, axis by axis, major first (as torch's DTensor does);
flat cuts use one ceiling over all axes (as XLA does); balanced cuts differ by at most one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

__all__ = [
    "NAMED_CUTS", "balanced_cuts", "cuts_from_sizes", "default_cuts", "default_interval",
    "default_is_flat", "filled_cuts", "finer_cuts", "flat_cuts", "known_default_cuts",
    "on_multiples",
]


def default_interval(length: int, digits: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The default shard at a coordinate, given as (axis size, digit) pairs, major to minor.

    The run time grows with the axes, not with the shards.

    >>> default_interval(5, [(2, 0), (2, 1)])
    (2, 3)
    """
    start, stop = 0, length
    for size, digit in digits:
        chunk = -(-(stop - start) // size)
        start = min(start + digit * chunk, stop)
        stop = min(start + chunk, stop)
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


@lru_cache(maxsize=65536)
def known_default_cuts(length: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return default_cuts(length, sizes)


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


def finer_cuts(cuts: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Cuts of which each piece is cut further, by default, over axes of `sizes`.

    >>> finer_cuts((0, 3, 7), (2,))
    (0, 2, 3, 5, 7)
    """
    fine = [0]
    for start, stop in pairwise(cuts):
        fine += [start + cut for cut in default_cuts(stop - start, sizes)[1:]]
    return tuple(fine)


def filled_cuts(cuts: Sequence[int]) -> tuple[int, ...]:
    """Cuts close to these for which no shard is empty; the length is at least the number of shards.

    >>> filled_cuts((0, 4, 4, 5)), filled_cuts((0, 2, 4, 5, 5))
    ((0, 3, 4, 5), (0, 2, 3, 4, 5))
    """
    near = list(cuts)
    for place in range(1, len(near) - 1):
        near[place] = max(near[place], near[place - 1] + 1)
    for place in range(len(near) - 2, 0, -1):
        near[place] = min(near[place], near[place + 1] - 1)
    return tuple(near)


def on_multiples(cuts: Sequence[int], length: int) -> tuple[int, ...]:
    """The nearest cuts that are multiples of `length`; both ends stay.

    >>> on_multiples((0, 3, 6, 8, 10), 4)
    (0, 4, 8, 8, 10)
    """
    inner = [min((2 * cut + length) // (2 * length) * length, cuts[-1]) for cut in cuts[1:-1]]
    return (0, *inner, cuts[-1])


def default_is_flat(length: int, sizes: Sequence[int]) -> bool:
    """Whether default and flat cuts agree; the run time grows with the axes, not the shards.

    >>> default_is_flat(5, (2, 2)), default_is_flat(7, (2, 2))
    (False, True)
    """
    count = math.prod(sizes)
    return _is_chunked(length, tuple(sizes), -(-length // count)) if length else True


def _is_chunked(length: int, sizes: tuple[int, ...], chunk: int) -> bool:
    # Are the default cuts of `length` at the multiples of `chunk`? One major axis leaves
    # equal pieces and at most one shorter piece, so there are two questions per axis.
    if not sizes or length == 0:
        return length <= chunk
    size, rest = sizes[0], sizes[1:]
    piece, want = -(-length // size), chunk * math.prod(rest)
    if size > 1 and piece != min(want, length):
        return False
    full, short = divmod(length, piece)
    return (not full or _is_chunked(piece, rest, chunk)) and _is_chunked(short, rest, chunk)


def cuts_from_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Offsets of consecutive shards."""
    return (0, *accumulate(sizes))


NAMED_CUTS = {"default": default_cuts, "flat": flat_cuts, "balanced": balanced_cuts}
"""The cuts that can be requested by name."""
