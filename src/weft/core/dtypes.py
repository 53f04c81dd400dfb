"""Dtypes by name: their short text, and which reductions they carry exactly.

A dtype is text here ("float32"), because this package imports no torch; `str(torch.float32)`
is understood as well.
"""

from __future__ import annotations

import re

__all__ = ["carries", "dtype_text"]

_BOOL, _INTEGER, _FLOAT, _COMPLEX = "bool", "integer", "float", "complex"

_FAMILY = re.compile(r"(?P<bool>bool)|(?P<integer>u?int)\d+|(?P<float>b?float)\d+\w*"
                     r"|(?P<complex>complex)\d+")

_SHORT = {"bool": "bool", "int": "i", "uint": "u", "float": "f", "bfloat": "bf", "complex": "c"}

_CARRIED_BY: dict[str, frozenset[str]] = {
    # A sum of bools is "any", as torch adds them.
    "sum": frozenset({_BOOL, _INTEGER, _FLOAT, _COMPLEX}),
    "avg": frozenset({_FLOAT, _COMPLEX}),
    "product": frozenset({_BOOL, _INTEGER, _FLOAT, _COMPLEX}),
    "max": frozenset({_BOOL, _INTEGER, _FLOAT}),
    "min": frozenset({_BOOL, _INTEGER, _FLOAT}),
    # Logical kinds make 1 of every other number, so only truth values survive them.
    "and": frozenset({_BOOL}),
    "or": frozenset({_BOOL}),
    "band": frozenset({_BOOL, _INTEGER}),
    "bor": frozenset({_BOOL, _INTEGER}),
    "bxor": frozenset({_BOOL, _INTEGER}),
}


def carries(kind: str, dtype: str) -> bool:
    """Whether terms of `dtype` can be reduced by `kind` without leaving the dtype's values."""
    match = _FAMILY.fullmatch(_name(dtype))
    return match is not None and match.lastgroup in _CARRIED_BY[kind]


def dtype_text(dtype: str) -> str:
    """The short name that a layout's text begins with; a name of no known family as it is.

    >>> dtype_text("float32"), dtype_text("torch.bfloat16"), dtype_text("float8_e4m3fn")
    ('f32', 'bf16', 'f8_e4m3fn')
    """
    name = _name(dtype)
    if not _FAMILY.fullmatch(name):
        return name
    family = re.match("[a-z]+", name)
    assert family is not None
    return _SHORT[family[0]] + name[family.end():]


def _name(dtype: str) -> str:
    return str(dtype).removeprefix("torch.")
