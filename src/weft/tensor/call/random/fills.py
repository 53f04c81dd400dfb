"""Ops that fill a tensor with draws of one distribution, in place or like another tensor.

Their arguments have passed torch's own checks (`weft.tensor.placing.refusals`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from weft.rng import samples
from weft.tensor.placing.draw import Sample

__all__ = ["FILLS"]


def _uniform(x: Tensor, low: float = 0.0, high: float = 1.0) -> Sample:
    return lambda source: samples.uniform(source, x.dtype, low, high)


def _normal_like(x: Tensor, mean: float = 0.0, std: float = 1.0) -> Sample:
    return lambda source: samples.normal(source, x.dtype, mean, std)


def _log_normal(x: Tensor, mean: float = 1.0, std: float = 2.0) -> Sample:
    return lambda source: samples.normal(source, samples.wide(x.dtype), mean, std).exp_()


def _exponential(x: Tensor, rate: float = 1.0) -> Sample:
    return lambda source: samples.exponential(source, x.dtype, rate)


def _cauchy(x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Sample:
    return lambda source: samples.cauchy(source, x.dtype, median, sigma)


def _geometric(x: Tensor, p: float) -> Sample:
    return lambda source: samples.geometric(source, x.dtype, p)


def _random(x: Tensor, first: int | None = None, second: int | None = None) -> Sample:
    """`random_()`, `random_(to)`, `random_(from, to)`."""
    if first is None:
        low, high = samples.random_range(x.dtype)
    elif second is None:
        low, high = 0, first
    else:
        low, high = first, second
    return lambda source: samples.integers(source, low, high, x.dtype)


def _bernoulli(x: Tensor, p: float) -> Sample:
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
