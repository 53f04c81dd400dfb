"""Parts of a call's key that the short route adds: what it says is what the general route says."""

from __future__ import annotations

from typing import Any

from weft.tensor.counts import NAN

__all__ = ["add_index", "floats_of"]

_NONE = type(None), None


def add_index(key: list[Any], index: Any) -> bool:
    """Add an index of slices, numbers, None and `...` as the general route does; False, and the
    key is of no use, where there is something else in it."""
    parts = index
    if type(index) is slice:
        parts = (index,)
    else:
        key += (tuple, len(index))
    for part in parts:
        if type(part) is slice:
            key.append(slice)
            for number in (part.start, part.stop, part.step):
                if type(number) is int:
                    key.append(number)
                elif number is None:
                    key += _NONE
                else:
                    return False
        elif type(part) is int:
            key.append(part)
        elif part is None or part is Ellipsis:
            key += (type(part), part)
        else:
            return False
    return True


def floats_of(given: Any) -> list[float]:
    """Numbers among the arguments, and in lists of them, in order."""
    found: list[float] = []
    for arg in given:
        if type(arg) is float:
            found.append(arg if arg == arg else NAN)
        elif type(arg) is list and arg and type(arg[0]) is float:
            found += [one if one == one else NAN for one in arg]
    return found
