"""Values from bits: uniform, normal and the distributions that one formula makes of them.

What needs no function of a math library (uniform, Bernoulli, integers) is the same to the bit on
every device. A lane is read as a signed number s in [-2^31, 2^31), so u = s / 2^32 + 1/2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from weft.rng.source import Source

__all__ = [
    "bernoulli", "bernoulli_of", "cauchy", "exponential", "geometric", "integers", "normal",
    "permutation", "random_range", "uniform", "unit", "wide",
]

_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of a significand: how finely [0, 1) is divided."""

_MAX64 = (1 << 63) - 1


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: half precision in float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def unit(source: Source, dtype: torch.dtype, sub: int = 0) -> torch.Tensor:
    """Uniform in [0, 1), in steps of the dtype's precision, exact."""
    if dtype.is_complex:
        return torch.view_as_complex(unit(_parts(source), dtype.to_real(), sub))
    digits = _DIGITS[dtype]
    if dtype is torch.float64:
        steps = source.bits64(sub) >> (64 - digits)
    else:
        steps = source.bits32(sub) >> (32 - digits)
    return steps.to(wide(dtype)).mul_(2.0**-digits).add_(0.5).to(dtype)


def _parts(source: Source) -> Source:
    """The real and imaginary parts of a complex tensor as elements of their own."""
    return Source(source.key, (*source.shape, 2), (*source.box, (0, 2)), source.device)


def uniform(
    source: Source, dtype: torch.dtype, low: float = 0.0, high: float = 1.0
) -> torch.Tensor:
    """Uniform in [low, high)."""
    found = unit(source, dtype)
    if (low, high) == (0.0, 1.0):
        return found
    found = found.mul_(high - low)
    if low == 0.0 or low == high:
        return found.add_(low)
    edge = torch.tensor(high, dtype=dtype, device=found.device)
    below = torch.nextafter(edge, torch.full_like(edge, -math.inf))  # a sum may round up to `high`
    return torch.minimum(found.add_(low), below.clamp_(min=low))


def above_zero(source: Source, dtype: torch.dtype, sub: int = 0) -> torch.Tensor:
    """Uniform in (0, 1], finer towards 0: what logarithms are taken of."""
    return _above_zero(source.bits64(sub) if dtype is torch.float64 else source.bits32(sub))


def _above_zero(bits: torch.Tensor) -> torch.Tensor:
    if bits.dtype is torch.int64:
        return bits.to(torch.float64).abs_().mul_(2.0**-63).add_(2.0**-64)
    return bits.to(torch.float32).abs_().mul_(2.0**-31).add_(2.0**-32)


def normal(
    source: Source, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0, sub: int = 0
) -> torch.Tensor:
    """Normal: Box and Muller's cosine and sine for two elements of two (Ann. Math. Stat., 1958)."""
    if dtype.is_complex:  # the variance is that of both parts together
        parts = normal(_parts(source), dtype.to_real(), 0.0, std * math.sqrt(0.5), sub)
        return torch.view_as_complex(parts).add_(mean)
    pairs = source.pairs(dtype is torch.float64, sub)
    bits = pairs.bits.unflatten(1, (-1, 2))
    radius = _above_zero(bits[..., 0]).log_().mul_(-2.0).sqrt_()
    bound = 63 if dtype is torch.float64 else 31
    angle = bits[..., 1].to(radius.dtype).mul_(math.pi * 2.0**-bound)
    out = torch.empty_like(bits, dtype=radius.dtype, memory_format=torch.contiguous_format)
    torch.mul(radius, angle.cos(), out=out[..., 0])
    torch.mul(radius, angle.sin_(), out=out[..., 1])
    found = pairs.taken(out.flatten(1))
    if std != 1.0:
        found = found.mul_(std)
    if mean != 0.0:
        found = found.add_(mean)
    return found.to(dtype)


def bernoulli(source: Source, p: float) -> torch.Tensor:
    """True with probability p, in steps of 2^-32."""
    if p >= 1.0:
        return torch.ones(source.local_shape, dtype=torch.bool, device=source.device)
    return source.bits32() < math.ceil(p * 2.0**32) - (1 << 31)


def bernoulli_of(source: Source, p: torch.Tensor) -> torch.Tensor:
    """True with the probability that `p`, of the box's shape, holds."""
    return source.bits32().to(torch.float64).add_(2.0**31) < p.to(torch.float64).mul(2.0**32)


def exponential(source: Source, dtype: torch.dtype, rate: float = 1.0) -> torch.Tensor:
    """Exponential: -log(u) / rate, never 0."""
    found = above_zero(source, dtype).log_().neg_()
    return found.clamp_(min=torch.finfo(found.dtype).eps / 2).div_(rate).to(dtype)


def cauchy(source: Source, dtype: torch.dtype, median: float, sigma: float) -> torch.Tensor:
    """Cauchy: median + sigma tan(pi (u - 1/2))."""
    is_double = dtype is torch.float64
    bits = source.bits64() if is_double else source.bits32()
    angle = bits.to(wide(dtype)).mul_(math.pi * 2.0 ** -(64 if is_double else 32))
    return angle.tan_().mul_(sigma).add_(median).to(dtype)


def geometric(source: Source, dtype: torch.dtype, p: float) -> torch.Tensor:
    """The number of trials up to the first success: ceil(log(u) / log(1 - p))."""
    found = above_zero(source, torch.float64).log_()
    found = found.div_(math.log1p(-p)) if p < 1.0 else found.zero_()
    return found.ceil_().clamp_(min=1.0).to(dtype)


def integers(source: Source, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers in [low, high), from 63 bits each.

    The remainder of so many bits favours the small numbers by a part in 2^31, up to a range of
    2^32; above, bits past the last whole multiple of the range are drawn again.
    """
    count = high - low
    if count == 1 << 64:
        return source.bits64().to(dtype)
    if count > _MAX64 + 1:  # all 64 bits, as unsigned ones: what is past the range is drawn again
        bits = _redrawn(source, lambda bits: bits.bitwise_xor(-1 - _MAX64) < count - (1 << 63))
        return bits.add_(low).to(dtype)
    if count <= 1 << 32:
        bits = source.bits64().bitwise_and_(_MAX64)
    else:
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
    """What `random_()` draws from: whole numbers that the dtype holds exactly, from 0 up."""
    if dtype is torch.bool:
        return 0, 2
    if dtype.is_floating_point:
        return 0, (1 << _DIGITS[dtype]) + 1
    return 0, torch.iinfo(dtype).max + 1


def permutation(source: Source) -> torch.Tensor:
    """0 to n - 1 in random order, for a source of shape (n,) as a whole: by sorting its bits."""
    return source.bits64().argsort(stable=True)
