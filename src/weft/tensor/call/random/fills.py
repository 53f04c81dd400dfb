"""Ops that fill a tensor with draws of one distribution, in place or like another tensor."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from weft.rng import samples
from weft.tensor.placing.draw import Sample

__all__ = ["FILLS"]


def _uniform(x: Tensor, low: float = 0.0, high: float = 1.0) -> Sample:
    if low > high:
        raise RuntimeError("uniform_ expects to return a [from, to) range, but found "
                           f"from={low} > to={high}")
    return lambda source: samples.uniform(source, x.dtype, low, high)


def _normal_like(x: Tensor, mean: float = 0.0, std: float = 1.0) -> Sample:
    if std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    return lambda source: samples.normal(source, x.dtype, mean, std)


def _log_normal(x: Tensor, mean: float = 1.0, std: float = 2.0) -> Sample:
    if std <= 0:
        raise RuntimeError(f"log_normal_ expects std > 0.0, but found std={std}")
    return lambda source: samples.normal(source, samples.wide(x.dtype), mean, std).exp_()


def _exponential(x: Tensor, rate: float = 1.0) -> Sample:
    if rate <= 0.0:
        raise RuntimeError(f"exponential_ expects lambda > 0.0, but found lambda={rate}")
    return lambda source: samples.exponential(source, x.dtype, rate)


def _cauchy(x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Sample:
    if sigma <= 0.0:
        raise RuntimeError(f"cauchy_ expects sigma > 0.0, but found sigma={sigma}")
    return lambda source: samples.cauchy(source, x.dtype, median, sigma)


def _geometric(x: Tensor, p: float) -> Sample:
    if not 0.0 < p < 1.0:
        raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={p}")
    return lambda source: samples.geometric(source, x.dtype, p)


def _random(x: Tensor, first: int | None = None, second: int | None = None) -> Sample:
    """`random_()`, `random_(to)`, `random_(from, to)`."""
    if first is None:
        low, high = samples.random_range(x.dtype)
    elif second is None:
        low, high = 0, first
    else:
        low, high = first, second
    if low >= high:
        raise RuntimeError("random_ expects 'from' to be less than 'to', but got "
                           f"from={low} >= to={high}")
    return lambda source: samples.integers(source, low, high, x.dtype)


def _bernoulli(x: Tensor, p: float) -> Sample:
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"bernoulli expects p to be in [0, 1], but got p={p}")
    return lambda source: samples.bernoulli(source, p, x.dtype)


FILLS: dict[str, Callable[..., Sample]] = {
    "uniform": _uniform,
    "normal_functional": _normal_like,
    "normal_": _normal_like,
    "log_normal": _log_normal,
    "exponential": _exponential,
    "cauchy": _cauchy,
    "geometric": _geometric,
    "random": _random,
    "bernoulli.p": _bernoulli,
    "bernoulli_.float": _bernoulli,
}
"""Op -> the sampler that its arguments mean for a tensor."""
