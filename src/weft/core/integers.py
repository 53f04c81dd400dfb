"""Whole numbers from whatever a user calls a size, a length or a rank."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from weft.errors import ShardTypeError, message

__all__ = ["integers"]


def integers(values: Any, call: str, what: str, fix: str) -> tuple[int, ...]:
    """`values` as a tuple of int; floats, text and truth values are refused, never rounded.

    Raises:
        ShardTypeError: `values` is no iterable, or holds something that is no whole number.
    """
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise ShardTypeError(
            message(call, f"{values!r}, of type {type(values).__name__}, is no sequence",
                    f"{what} are given as a sequence of whole numbers", [repr(values)], fix)
        )
    values = tuple(values)
    try:
        whole = tuple(map(index, values))
    except TypeError:
        whole = ()
    if len(whole) == len(values) and bool not in set(map(type, values)):
        return whole
    bad = [f"{value!r} ({type(value).__name__})" for value in values if not _is_whole(value)]
    raise ShardTypeError(
        message(call, f"{len(bad)} of {len(values)} entries are no whole numbers",
                f"{what} are whole numbers", bad, fix)
    )


def _is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)
