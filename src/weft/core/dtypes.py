"""Dtypes by name: their short text, and the reductions that they carry exactly.

A dtype is text here ("float32"), because this package imports no torch; `str(torch.float32)`
is accepted as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from weft.errors import LayoutError

__all__ = ["carries", "check_carries", "dtype_name", "dtype_text", "itemsize"]

_BOOL, _INTEGER, _FLOAT, _COMPLEX = "bool", "integer", "float", "complex"

_FAMILY = re.compile(
    r"(?P<bool>bool)|(?P<integer>u?int(?:8|16|32|64))"
    r"|(?P<float>float(?:16|32|64)|bfloat16|float[48]_\w+)|(?P<complex>complex(?:32|64|128))"
)

_SHORT = {"bool": "bool", "int": "i", "uint": "u", "float": "f", "bfloat": "bf", "complex": "c"}

_LONG = {short: long for long, short in _SHORT.items()}

_CARRIED_BY: dict[str, frozenset[str]] = {
    # A sum of bools is "any", as in torch.
    "sum": frozenset({_BOOL, _INTEGER, _FLOAT, _COMPLEX}),
    "avg": frozenset({_FLOAT, _COMPLEX}),
    "product": frozenset({_BOOL, _INTEGER, _FLOAT, _COMPLEX}),
    "max": frozenset({_BOOL, _INTEGER, _FLOAT}),
    "min": frozenset({_BOOL, _INTEGER, _FLOAT}),
    # Logical kinds turn every nonzero number into 1, so only truth values survive them.
    "and": frozenset({_BOOL}),
    "or": frozenset({_BOOL}),
    "band": frozenset({_BOOL, _INTEGER}),
    "bor": frozenset({_BOOL, _INTEGER}),
    "bxor": frozenset({_BOOL, _INTEGER}),
}


def carries(kind: str, dtype: str) -> bool:
    """Whether partial values of `dtype` can be reduced by `kind` without leaving the dtype."""
    match = _FAMILY.fullmatch(_name(dtype))
    if kind == "sum" and _name(dtype) == "float8_e8m0fnu":
        return False  # only powers of two: it has no zero for the other partial values
    return match is not None and match.lastgroup in _CARRIED_BY[kind]


def check_carries(what: str, kinds: Mapping[str, str], dtype: str) -> None:
    """Raise LayoutError for kinds that a dtype cannot carry exactly, by their names; `what` names
    the value in question."""
    wrong = [name for name, kind in kinds.items() if not carries(kind, dtype)]
    if not wrong:
        return
    sums = carries("sum", dtype)
    raise LayoutError(
        what, f"{len(wrong)} partial axes cannot carry {dtype}",
        "avg is for floats and complex, max and min for all but complex, band, "
        "bor and bxor for integers and bools, and and or for bools" if sums
        else "a partial value of a sum may be zero, which this dtype lacks", wrong,
        'Partial("sum") carries every dtype; or convert the tensor first' if sums
        else "x.float() first")


def dtype_text(dtype: str) -> str:
    """The short name with which a layout's text begins; an unknown name is returned as it is.

    >>> dtype_text("float32"), dtype_text("torch.bfloat16"), dtype_text("float8_e4m3fn")
    ('f32', 'bf16', 'f8_e4m3fn')
    """
    name = _name(dtype)
    if not _FAMILY.fullmatch(name):
        return name
    family = re.match("[a-z]+", name)
    assert family is not None
    return _SHORT[family[0]] + name[family.end():]


def dtype_name(text: str, call: str = "dtype") -> str:
    """The full name of a dtype given by its short or full name.

    Raises:
        LayoutError: an unknown name.

    >>> dtype_name("f32"), dtype_name("torch.bool"), dtype_name("bf16")
    ('float32', 'bool', 'bfloat16')
    """
    name = _name(text)
    short = re.fullmatch(r"(bf|f|i|u|c)(\d+\w*)", name)
    if short:
        name = _LONG[short[1]] + short[2]
    if not _FAMILY.fullmatch(name):
        raise LayoutError(
            call, f"{text!r} names no dtype",
            "a dtype is named as torch names it, or as a layout's text does: float32 or "
            "f32, bfloat16, int64, bool, complex64, float8_e4m3fn", [repr(text)], "float32")
    return name


@lru_cache(maxsize=64)
def itemsize(dtype: str) -> int:
    """Bytes per element.

    >>> itemsize("float32"), itemsize("torch.bool"), itemsize("float8_e4m3fn")
    (4, 1, 1)
    """
    bits = re.search(r"\d+", _name(dtype))
    return max(int(bits[0]) // 8, 1) if bits else 1


def _name(dtype: str) -> str:
    return str(dtype).removeprefix("torch.")
