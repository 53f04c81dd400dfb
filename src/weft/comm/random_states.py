"""The states of the generators behind Python's `random` and numpy's, read again only if changed.

Python gives its state as a tuple of 625 numbers, which takes 12 us, and numpy's takes 100: several
times what it takes to pass the baton from rank to rank. Ranks that draw nothing leave both
unchanged, which comparing the 2500 bytes in memory shows in a microsecond. The bytes are read by
ctypes, and checked against the packages' own answers at import. If they do not agree (another
version), the state is read each time. It is set only through the packages' own calls.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["NUMPYS", "PYTHONS", "Generator", "RandomState"]

_python: Any = random._inst  # type: ignore[attr-defined]
_numpy: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
_bits: Any = _numpy._bit_generator
_HEAD = object.__basicsize__  # of every object: its type, and how many refer to it
_PYTHON = struct.Struct("@i624I")  # of CPython's RandomObject: the position, the words
_NUMPY = struct.Struct("@624Ii")  # of numpy's mt19937_state: the words, the position


def _bytes_at(address: int, size: int) -> Any:
    """Memory that stays where it is; its `raw` is what it holds now."""
    return (ctypes.c_char * size).from_address(address)


_python_words = _bytes_at(id(_python) + _HEAD, _PYTHON.size)
_numpy_words = _bytes_at(_bits.ctypes.state_address, _NUMPY.size)
_numpy_object = _bytes_at(id(_numpy) + _HEAD, type(_numpy).__basicsize__ - _HEAD)


class Generator(NamedTuple):
    """A generator: what gives its state and sets it, and what changes with it, if that is known."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    look: Callable[[], Any] | None


def _look_at_python() -> tuple[bytes, float | None]:
    """The words, and the second of the pair of numbers that `gauss` draws and Python keeps."""
    return _python_words.raw, _python.gauss_next


def _python_is_as_looked_at() -> bool:
    base: Any = type(_python).__mro__[-2]
    if base.__basicsize__ != _HEAD + _PYTHON.size + (-_PYTHON.size) % 8:
        return False
    index, *words = _PYTHON.unpack(_look_at_python()[0])
    return (*words, index) == random.getstate()[1]


def _look_at_numpy() -> tuple[bytes, bytes] | None:
    """The words, and the object, which has the second of the pair of numbers that `randn` draws;
    None if `numpy.random.set_bit_generator` has set other bits."""
    return (_numpy_words.raw, _numpy_object.raw) if _numpy._bit_generator is _bits else None


def _numpys_state() -> Any:
    return _numpy.get_state(legacy=False)


def _numpy_is_as_looked_at() -> bool:
    if type(_bits) is not np.random.MT19937:
        return False
    words, rest = _numpy_words.raw, _numpy_object.raw
    state = _numpys_state()
    *key, index = _NUMPY.unpack(words)
    told = state["state"]
    return (key, index) == (told["key"].tolist(), told["pos"]) and (
        struct.pack("@d", state["gauss"]) in rest)


PYTHONS = Generator(
    random.getstate, random.setstate, _look_at_python if _python_is_as_looked_at() else None)
NUMPYS = Generator(
    _numpys_state, _numpy.set_state, _look_at_numpy if _numpy_is_as_looked_at() else None)


class RandomState:
    """The state of a generator at one moment. `known`: an earlier one that may be the same."""

    __slots__ = ("generator", "seen", "state")

    def __init__(self, generator: Generator, known: RandomState | None) -> None:
        self.generator = generator
        self.seen = None if generator.look is None else generator.look()
        if known is not None and self.seen is not None and self.seen == known.seen:
            self.state = known.state
        else:
            self.state = generator.get()

    def restore(self) -> None:
        look = self.generator.look
        if look is None or self.seen is None or self.seen != look():
            self.generator.set(self.state)
