"""Counters of look-ups that threads share: exact without a lock, 20 ns a step.

`next` of an `itertools.count` is one step of C under Python's lock, so that no update is lost.
Its text is the only way to read the count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

__all__ = [
    "AGAIN", "CALLS", "METAS", "MISSES", "NAN", "STRUCTURES", "TRACES", "TRANSITIONS", "Counter",
    "Hits",
]

NAN = math.nan
"""Stands for every NaN in a key: others are equal to nothing, so that each would be a miss."""


class Counter:
    """`step()` adds one; `value` counts the steps since `reset`."""

    __slots__ = ("_base", "_count", "step")

    def __init__(self) -> None:
        self._count = itertools.count()
        self._base = 0
        self.step: Callable[[], int] = self._count.__next__

    @property
    def value(self) -> int:
        return self._total() - self._base

    def reset(self) -> None:
        self._base = self._total()

    def _total(self) -> int:
        return int(repr(self._count).removeprefix("count(").removesuffix(")"))


class Hits:
    """Hits and misses of one table."""

    __slots__ = ("hits", "misses")

    def __init__(self) -> None:
        self.hits, self.misses = Counter(), Counter()


CALLS, AGAIN, MISSES = Counter(), Counter(), Counter()
"""Look-ups of recipes, those among them that did not decide (the call took another route, where it
was looked up again or needed no recipe), and recipes built. The rest are hits."""

STRUCTURES, TRACES, METAS, TRANSITIONS = Hits(), Hits(), Hits(), Hits()
