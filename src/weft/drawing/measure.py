"""Lengths to scale if there is room, and never too small to be read."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["shares"]


def shares(sizes: Sequence[float], total: float, least: Sequence[float]) -> list[float]:
    """Parts of `total` in proportion to `sizes`, each at least its `least`.

    Their sum is `total`, or that of `least` where this is more.

    >>> shares([1, 2, 7], 10, [2, 1, 1])
    [2, 1.7777777777777777, 6.222222222222222]
    """
    fixed: dict[int, float] = {}
    while True:
        free = [place for place in range(len(sizes)) if place not in fixed]
        room, whole = total - sum(fixed.values()), sum(sizes[place] for place in free)
        want = {place: room * sizes[place] / whole if whole else room / len(free) for place in free}
        small = {place: least[place] for place in free if want[place] < least[place]}
        if not small:
            return [fixed.get(place, want.get(place, 0)) for place in range(len(sizes))]
        fixed |= small
