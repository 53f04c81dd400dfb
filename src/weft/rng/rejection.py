"""Values that take an unknown number of draws: gamma, Poisson, binomial.

Every attempt has substreams of its own, so an element depends on its own bits and its own
parameters, not on how often its neighbours were rejected. Everything is computed in float64.
Parameters out of range give nan, because none of their attempts would ever be accepted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.rng.samples import normal, unit
from weft.rng.source import Source

__all__ = ["binomial", "gamma", "poisson"]

_FEW = 10.0
"""Up to this mean, counts are found by adding up their probabilities."""

_F64 = torch.float64


def gamma(source: Source, shape: Tensor) -> Tensor:
    """Gamma of rate 1: Marsaglia and Tsang, "A simple method for generating gamma variables"
    (ACM TOMS, 2000). `shape` has the box's shape; if it is tiny, values may underflow to 0."""
    shape = shape.to(_F64)
    valid = (shape >= 0.0) & shape.isfinite()
    shape = torch.where(valid, shape, 1.0)
    small = shape < 1.0
    d = torch.where(small, shape + 1.0, shape) - 1.0 / 3.0
    c = (9.0 * d).rsqrt()

    def attempt(number: int) -> tuple[Tensor, Tensor]:
        x = normal(source, _F64, sub=2 * number + 1)
        v = (1.0 + c * x) ** 3
        u = unit(source, _F64, 2 * number + 2)
        bound = 0.5 * x * x + d - d * v + d * v.clamp(min=1e-300).log()
        return d * v, (v > 0.0) & ((-u).log1p() < bound)

    found = _first_accepted(attempt)
    factor = (-unit(source, _F64)).log1p().div(shape).exp()
    return torch.where(small, found * factor, found).masked_fill_(~valid, torch.nan)


def poisson(source: Source, rate: Tensor) -> Tensor:
    """Poisson: by adding up, or PTRS of Hörmann, "The transformed rejection method for generating
    Poisson random variables" (Insurance: Mathematics and Economics, 1993)."""
    rate = rate.to(_F64)
    valid = (rate >= 0.0) & rate.isfinite()
    rate = torch.where(valid, rate, 0.0)
    few = rate < _FEW
    little = torch.where(few, rate, 0.0)
    counts = _by_adding_up(source, (-little).exp(), lambda count: little / count)
    if bool(few.all()):
        return counts.masked_fill_(~valid, torch.nan)
    mean = torch.where(few, _FEW, rate)
    b = 0.931 + 2.53 * mean.sqrt()
    a = -0.059 + 0.02483 * b
    ratio = 1.1239 + 1.1328 / (b - 3.4)
    quick = 0.9277 - 3.6224 / (b - 2.0)

    def attempt(number: int) -> tuple[Tensor, Tensor]:
        u, v, us = _two(source, number)
        k = ((2.0 * a / us + b) * u + mean + 0.43).floor()
        bound = k * mean.log() - mean - (k.clamp(min=0.0) + 1.0).lgamma()
        slow = (v * ratio / (a / (us * us) + b)).log() <= bound
        sure = (us >= 0.07) & (v <= quick)
        return k, sure | ((k >= 0.0) & ~((us < 0.013) & (v > us)) & slow)

    return torch.where(few, counts, _first_accepted(attempt)).masked_fill_(~valid, torch.nan)


def binomial(source: Source, count: Tensor, p: Tensor) -> Tensor:
    """Binomial: by adding up, or BTRS of Hörmann, "The generation of binomial random variates"
    (Journal of Statistical Computation and Simulation, 1993)."""
    count, given = count.to(_F64), p.to(_F64)
    valid = (count >= 0.0) & count.isfinite() & (given >= 0.0) & (given <= 1.0)
    count, given = torch.where(valid, count, 0.0), torch.where(valid, given, 0.0)
    p = torch.minimum(given, 1.0 - given)
    few = count * p < _FEW
    little = torch.where(few, p, 0.0)
    odds = little / (1.0 - little)
    start = (count * (-little).log1p()).exp()
    counts = _by_adding_up(source, start, lambda k: odds * ((count + 1.0 - k) / k).clamp(min=0.0))
    if not bool(few.all()):
        large = _btrs(source, torch.where(few, 4.0 * _FEW, count), torch.where(few, 0.5, p))
        counts = torch.where(few, counts, large)
    found = torch.where(given > 0.5, count - counts, counts)
    return found.masked_fill_(~valid, torch.nan)


def _btrs(source: Source, count: Tensor, p: Tensor) -> Tensor:
    deviation = (count * p * (1.0 - p)).sqrt()
    b = 1.15 + 2.53 * deviation
    a = -0.0873 + 0.0248 * b + 0.01 * p
    quick, ratio = 0.92 - 4.2 / b, (2.83 + 5.1 / b) * deviation
    mode, odds = ((count + 1.0) * p).floor(), (p / (1.0 - p)).log()
    top = (mode + 1.0).lgamma() + (count - mode + 1.0).lgamma()

    def attempt(number: int) -> tuple[Tensor, Tensor]:
        u, v, us = _two(source, number)
        k = ((2.0 * a / us + b) * u + count * p + 0.5).floor()
        inside = (k >= 0.0) & (k <= count)
        held = torch.where(inside, k, mode)
        bound = top - (held + 1.0).lgamma() - (count - held + 1.0).lgamma() + (held - mode) * odds
        slow = (v * ratio / (a / (us * us) + b)).log() <= bound
        return k, inside & (((us >= 0.07) & (v <= quick)) | slow)

    return _first_accepted(attempt)


def _two(source: Source, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """An attempt's two uniforms: one in [-1/2, 1/2) and one in (0, 1], and the distance of the
    first from the ends."""
    u = unit(source, _F64, 2 * number + 1) - 0.5
    return u, 1.0 - unit(source, _F64, 2 * number + 2), 0.5 - u.abs()


def _first_accepted(attempt: Callable[[int], tuple[Tensor, Tensor]]) -> Tensor:
    """Per element, the value of its first accepted attempt."""
    found, accepted = attempt(0)
    number = 0
    while not bool(accepted.all()):
        number += 1
        value, now = attempt(number)
        found = torch.where(accepted, found, value)
        accepted |= now
    return found


def _by_adding_up(
    source: Source, start: Tensor, ratio: Callable[[float], Tensor]
) -> Tensor:
    """The first count up to which the probabilities exceed u: `start` is the probability of 0, and
    `ratio` gives the factor from each count to the next."""
    u = unit(source, _F64)
    counts, term, total = torch.zeros_like(u), start, start
    at = 0.0
    while True:
        beyond = u >= total
        at += 1.0
        term = term * ratio(at)
        if not bool((beyond & (term > 0.0)).any()):
            return counts
        counts += beyond & (term > 0.0)
        total = total + term
