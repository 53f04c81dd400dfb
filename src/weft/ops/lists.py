"""Ops over lists of tensors: one op for each element."""

from __future__ import annotations

from weft.rules import op, page

__all__ = ["PAGE"]


def _named(names: str) -> str:
    return " ".join([f"_foreach_{name}" for name in names.split()])


PAGE = page(
    op(_named("""
        abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf
        erfc exp expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow
        reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero
        """), lists="blocks"),
    op(_named("max mm norm powsum"), lists="elements"),
)
