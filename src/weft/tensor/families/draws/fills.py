"""Ops that fill a tensor with draws of one distribution, in place or like another tensor.

Their arguments have passed torch's own checks (`weft.tensor.placing.refusals`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.rng import samples
from weft.rules import Entry, op, page
from weft.tensor.families.draws.samplers import with_zero_gradients, without_derivative
from weft.tensor.placing.draw import Sample, draw_into

__all__ = ["PAGE"]


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


def _in_place(sampler: Callable[..., Sample]) -> Callable[..., None]:
    def fill(x: Tensor, *args: Any, generator: Any = None, **options: Any) -> None:
        """Each rank draws its own elements into the tensor."""
        draw_into(x, sampler(x, *args, **options), generator)

    return fill


def _like(
    name: str, sampler: Callable[..., Sample], memory_format: torch.memory_format,
    has_derivative: bool,
) -> Callable[..., Tensor]:
    def draw(x: Tensor, *args: Any, generator: Any = None, **options: Any) -> Tensor:
        """Drawn into a tensor of x's layout; its gradient is zero."""
        made = torch.empty_like(x, memory_format=memory_format)
        draw_into(made, sampler(x, *args, **options), generator)
        made = with_zero_gradients(made, [x])
        return made if has_derivative else without_derivative(made, name)

    return draw


def _entries(
    in_place: str, out_of_place: str, sampler: Callable[..., Sample],
    memory_format: torch.memory_format = torch.preserve_format, has_derivative: bool = True,
) -> tuple[Entry, Entry]:
    name = out_of_place.partition(".")[0]
    return (
        op(in_place, compose=_in_place(sampler), each_call=True),
        op(out_of_place, compose=_like(name, sampler, memory_format, has_derivative),
           each_call=True),
    )


PAGE = page(
    *_entries("uniform_", "uniform", _uniform),
    *_entries("normal_", "normal_functional", _normal_like, has_derivative=False),
    *_entries("log_normal_", "log_normal", _log_normal),
    *_entries("exponential_", "exponential", _exponential),
    *_entries("cauchy_", "cauchy", _cauchy),
    *_entries("geometric_", "geometric", _geometric),
    *_entries("random_", "random", _random),
    *_entries("bernoulli_.float", "bernoulli.p", _bernoulli, torch.contiguous_format, False),
)
