"""The state of the generator behind Python's `random`, got again only where it has changed.

As Python gives it, it is a tuple of 625 numbers, 12 us to make: several times what it takes to pass
the baton from rank to rank. Ranks that draw nothing leave it as it is, which a look at the 2500
bytes in memory tells in half a microsecond. The look is a read, by ctypes, and is checked against
Python's own answer when this is imported; where it does not hold (another Python), the state is
got each time. It is set through `random.setstate` alone.
"""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any

__all__ = ["RandomState"]

_generator: Any = random._inst  # type: ignore[attr-defined]
_WORDS = struct.Struct("@i624I")  # of CPython's RandomObject: where it stands, the state
_ADDRESS = id(_generator) + object.__basicsize__


def _look() -> tuple[bytes, float | None]:
    """The words, and the second of the pair of numbers that `gauss` draws, kept by Python."""
    return ctypes.string_at(_ADDRESS, _WORDS.size), _generator.gauss_next


def _can_look() -> bool:
    base: Any = type(_generator).__mro__[-2]
    if base.__basicsize__ != object.__basicsize__ + _WORDS.size + (-_WORDS.size) % 8:
        return False
    index, *words = _WORDS.unpack(_look()[0])
    return (*words, index) == random.getstate()[1]


_LOOKS = _can_look()


class RandomState:
    """The state at one moment. `known`: one that may be the same."""

    __slots__ = ("seen", "state")

    def __init__(self, known: RandomState | None) -> None:
        self.seen = _look() if _LOOKS else None
        if known is not None and self.seen is not None and self.seen == known.seen:
            self.state = known.state
        else:
            self.state = random.getstate()

    def restore(self) -> None:
        """Make it so again."""
        if self.seen is None or self.seen != _look():
            random.setstate(self.state)
