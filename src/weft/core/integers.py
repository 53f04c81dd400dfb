"""Whole numbers from whatever a user passes as a size, a length or a rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, cast

from weft.errors import LayoutError, ShardTypeError

__all__ = ["integers", "lengths_of", "listed"]


def integers(values: Any, call: str, what: str, fix: str) -> tuple[int, ...]:
    """`values` as a tuple of int; floats, text and truth values are refused, never rounded.

    Raises:
        ShardTypeError: `values` is not iterable, or contains something that is not a whole number.
    """
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise ShardTypeError(
            call, f"{values!r}, of type {type(values).__name__}, is no sequence",
            f"{what} are given as a sequence of whole numbers", [repr(values)], fix)
    given = tuple(cast(Iterable[Any], values))
    try:
        whole = tuple(map(index, given))
    except TypeError:
        whole = ()
    if len(whole) == len(given) and bool not in set(map(type, given)):
        return whole
    bad = [f"{value!r} ({type(value).__name__})" for value in given
           if not hasattr(value, "__index__") or isinstance(value, bool)]
    raise ShardTypeError(
        call, f"{len(bad)} of {len(given)} entries are no whole numbers",
        f"{what} are whole numbers", bad, fix)


def lengths_of(shape: Iterable[int]) -> tuple[int, ...]:
    """The lengths of a global shape, as checked whole numbers."""
    lengths = integers(shape, "Layout(shape)", "lengths", "Layout(mesh, (8, 16), P('dp'))")
    negative = [f"dim {dim}: {length}" for dim, length in enumerate(lengths) if length < 0]
    if negative:
        raise LayoutError(
            "Layout(shape)", f"{len(negative)} of {len(lengths)} lengths of {lengths} are "
            "negative", "a length is at least 0", negative,
            "Layout(mesh, (8, 16), P('dp'))")
    return lengths


def listed(value: object) -> Sequence[Any] | None:
    return cast(Sequence[Any], value) if isinstance(value, (tuple, list)) else None
