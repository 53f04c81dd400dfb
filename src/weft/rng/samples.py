"""Values from bits: uniform, normal and the distributions that one formula derives from them.

Values that need no function of a math library (uniform, Bernoulli, integers) are bitwise the same
on every device. A lane is read as a signed number s in [-2^31, 2^31), so u = s / 2^32 + 1/2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from weft.rng.source import Make, Source

__all__ = [
    "bernoulli", "bernoulli_of", "cauchy", "exponential", "geometric", "integers", "normal",
    "permutation", "random_range", "uniform", "unit", "wide",
]

_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of a significand: how finely [0, 1) is divided."""

_MAX32, _MAX64 = (1 << 32) - 1, (1 << 63) - 1


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: half precision in float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def unit(source: Source, dtype: torch.dtype, sub: int = 0) -> torch.Tensor:
    """Uniform in [0, 1), in steps of the dtype's precision, exact."""
    if dtype.is_complex:
        return torch.view_as_complex(unit(_parts(source), dtype.to_real(), sub))
    return source.values(dtype, _unit(dtype), dtype is torch.float64, sub)


def _unit(dtype: torch.dtype) -> Make:
    digits, real = _DIGITS[dtype], wide(dtype)
    return lambda bits: (
        bits.bitwise_and_((1 << digits) - 1).to(real).mul_(2.0**-digits)
    )


def _parts(source: Source) -> Source:
    """The real and imaginary parts of a complex tensor as separate elements."""
    return Source(source.key, (*source.shape, 2), (*source.box, (0, 2)), source.device)


def uniform(
    source: Source, dtype: torch.dtype, low: float = 0.0, high: float = 1.0
) -> torch.Tensor:
    """Uniform in [low, high); for complex numbers, both parts."""
    if dtype.is_complex:
        return torch.view_as_complex(uniform(_parts(source), dtype.to_real(), low, high))
    if low == high:
        return torch.full(source.local_shape, low, dtype=dtype, device=source.device)
    make, scale = _unit(dtype), high - low
    if low == 0.0:
        return source.values(
            dtype, lambda bits: make(bits).mul_(scale), dtype is torch.float64
        )
    edge = torch.tensor(high, dtype=dtype)
    below = float(torch.nextafter(edge, torch.tensor(-math.inf, dtype=dtype)))

    def between(bits: torch.Tensor) -> torch.Tensor:
        found = make(bits).to(dtype).mul_(scale).add_(low)
        return found.clamp_(low, below)  # a sum may round up to `high`

    return source.values(dtype, between, dtype is torch.float64)


def _above_zero(bits: torch.Tensor) -> torch.Tensor:
    """Uniform in (0, 1], finer towards 0, for logarithms."""
    if bits.dtype is torch.int64:
        return bits.to(torch.float64).abs_().mul_(2.0**-63).add_(2.0**-64)
    return bits.to(torch.float32).abs_().mul_(2.0**-31).add_(2.0**-32)


def normal(
    source: Source, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0, sub: int = 0
) -> torch.Tensor:
    """Normal, by the inverse of its distribution function: sqrt(2) erfinv(x), x in (-1, 1).

    It takes half the time of Box and Muller's cosines, and gives one number from one. Values reach
    5.4 in float32 (8.3 in float64); torch's own reach 5.8.
    """
    if dtype.is_complex:  # the variance is that of both parts together
        parts = normal(_parts(source), dtype.to_real(), 0.0, std * math.sqrt(0.5), sub)
        return torch.view_as_complex(parts).add_(mean)
    real = wide(dtype)
    bound, digits = (63, 53) if real is torch.float64 else (31, 24)
    inside = 2.0**-bound * (1.0 - 2.0**-digits)  # never 1, where the inverse is infinite
    scale = math.sqrt(2.0) * std

    def make(bits: torch.Tensor) -> torch.Tensor:
        found = bits.to(real).mul_(inside).erfinv_().mul_(scale)
        return found if mean == 0.0 else found.add_(mean)

    return source.values(dtype, make, dtype is torch.float64, sub)


def bernoulli(source: Source, p: float, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """True (or 1) with probability p, in steps of 2^-32."""
    if p >= 1.0:
        return torch.ones(source.local_shape, dtype=dtype, device=source.device)
    edge = math.ceil(p * 2.0**32) - (1 << 31)
    return source.values(dtype, lambda bits: bits < edge)


def bernoulli_of(source: Source, p: torch.Tensor) -> torch.Tensor:
    """True with the probability that `p`, of the box's shape, holds."""
    return source.bits32().to(torch.float64).add_(2.0**31) < p.to(torch.float64).mul(2.0**32)


def exponential(source: Source, dtype: torch.dtype, rate: float = 1.0) -> torch.Tensor:
    """Exponential: -log(u) / rate, never 0."""
    least = torch.finfo(wide(dtype)).eps / 2

    def make(bits: torch.Tensor) -> torch.Tensor:
        return _above_zero(bits).log_().neg_().clamp_(min=least).div_(rate)

    return source.values(dtype, make, dtype is torch.float64)


def cauchy(source: Source, dtype: torch.dtype, median: float, sigma: float) -> torch.Tensor:
    """Cauchy: median + sigma tan(pi (u - 1/2))."""
    real, is_wide = wide(dtype), dtype is torch.float64
    scale = math.pi * 2.0 ** -(64 if is_wide else 32)

    def make(bits: torch.Tensor) -> torch.Tensor:
        return bits.to(real).mul_(scale).tan_().mul_(sigma).add_(median)

    return source.values(dtype, make, is_wide)


def geometric(source: Source, dtype: torch.dtype, p: float) -> torch.Tensor:
    """The number of trials up to the first success: ceil(log(u) / log(1 - p))."""
    scale = 1.0 / math.log1p(-p) if p < 1.0 else 0.0

    def make(bits: torch.Tensor) -> torch.Tensor:
        return _above_zero(bits).log_().mul_(scale).ceil_().clamp_(min=1.0)

    return source.values(dtype, make, True)


def integers(source: Source, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers in [low, high).

    Up to a range of 2^16, the high part of a lane times the range is used, which favours some
    numbers by at most a part in 2^16. Up to 2^32, the remainder of 63 bits is used, which favours
    small numbers by a part in 2^31. Above, bits past the last whole multiple of the range are drawn
    again.
    """
    count = high - low
    if count <= 1 << 16:
        return source.values(dtype, lambda bits: (
            bits.long().bitwise_and_(_MAX32).mul_(count).bitwise_right_shift_(32).add_(low)
        ))
    if count <= 1 << 32:
        return source.values(
            dtype, lambda bits: bits.bitwise_and_(_MAX64).fmod_(count).add_(low), True
        )
    if count == 1 << 64:
        return source.bits64().to(dtype)
    if count > _MAX64 + 1:  # all 64 bits, unsigned: values past the range are drawn again
        bits = _redrawn(source, lambda bits: bits.bitwise_xor(-1 - _MAX64) < count - (1 << 63))
        return bits.add_(low).to(dtype)
    last = (_MAX64 + 1) // count * count - 1
    bits = _redrawn(source, lambda bits: bits.bitwise_and(_MAX64) <= last).bitwise_and_(_MAX64)
    return (bits.fmod_(count) if count <= _MAX64 else bits).add_(low).to(dtype)


def _redrawn(source: Source, accept: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """64 bits an element, from its first substream whose bits are accepted."""
    bits, sub = source.bits64(), 0
    while not bool((accepted := accept(bits)).all()):
        sub += 1
        bits = torch.where(accepted, bits, source.bits64(sub))
    return bits


def random_range(dtype: torch.dtype) -> tuple[int, int]:
    """What `random_()` draws from: whole numbers from 0 that the dtype holds exactly."""
    if dtype is torch.bool:
        return 0, 2
    if dtype.is_floating_point:
        return 0, (1 << _DIGITS[dtype]) + 1
    return 0, torch.iinfo(dtype).max + 1


def permutation(source: Source) -> torch.Tensor:
    """0 to n - 1 in random order, for a source of shape (n,) as a whole: by sorting its bits."""
    return source.bits64().argsort(stable=True)
