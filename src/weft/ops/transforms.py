"""What mixes all elements of dims that it keeps, and gives them other lengths: Fourier transforms,
glu. These dims are whole, the others pass."""

from __future__ import annotations

from weft.rules import op, page, rule

__all__ = ["PAGE"]

PAGE = page(
    op("_fft_c2c", rule("...>0 s! -> ... s", along="dim", linear=[0])),
    op("_fft_r2c _fft_c2r", rule("...>0 s! -> ... t", along="dim", linear=[0])),
    op("glu", rule("... s! -> ... t", along="dim", default=-1)),
)
