"""Ops that fill a tensor with draws of one distribution, in place or like another tensor.

Their arguments have passed torch's own checks (`weft.tensor.placing.refusals`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.rng import Source, samples
from weft.rules import Entry, op, page
from weft.tensor.families.draws.samplers import with_zero_gradients, without_derivative
from weft.tensor.placing.draw import draw_into

__all__ = ["PAGE"]


Sampler = Callable[..., Tensor]
"""Of a source, a dtype and the op's numbers."""


def _log_normal(source: Source, dtype: torch.dtype, mean: float, std: float) -> Tensor:
    return samples.normal(source, samples.wide(dtype), mean, std).exp_()


def _random(
    source: Source, dtype: torch.dtype, first: int | None = None, second: int | None = None
) -> Tensor:
    """`random_()`, `random_(to)`, `random_(from, to)`."""
    if first is None:
        low, high = samples.random_range(dtype)
    else:
        low, high = (0, first) if second is None else (first, second)
    return samples.integers(source, low, high, dtype)


def _bernoulli(source: Source, dtype: torch.dtype, p: float) -> Tensor:
    return samples.bernoulli(source, p, dtype)


def _in_place(sampler: Sampler) -> Callable[..., None]:
    def fill(x: Tensor, *args: Any, generator: Any = None) -> None:
        """Each rank draws its own elements into the tensor."""
        draw_into(x, lambda source: sampler(source, x.dtype, *args), generator)

    return fill


def _like(
    name: str, sampler: Sampler, memory_format: torch.memory_format, has_derivative: bool
) -> Callable[..., Tensor]:
    def draw(x: Tensor, *args: Any, generator: Any = None) -> Tensor:
        """Drawn into a tensor of x's layout; its gradient is zero."""
        made = torch.empty_like(x, memory_format=memory_format)
        draw_into(made, lambda source: sampler(source, x.dtype, *args), generator)
        made = with_zero_gradients(made, [x])
        return made if has_derivative else without_derivative(made, name)

    return draw


def _entries(
    in_place: str, out_of_place: str, sampler: Sampler,
    memory_format: torch.memory_format = torch.preserve_format, has_derivative: bool = True,
) -> tuple[Entry, Entry]:
    name = out_of_place.partition(".")[0]
    return (
        op(in_place, compose=_in_place(sampler), each_call=True),
        op(out_of_place, compose=_like(name, sampler, memory_format, has_derivative),
           each_call=True),
    )


PAGE = page(
    *_entries("uniform_", "uniform", samples.uniform),
    *_entries("normal_", "normal_functional", samples.normal, has_derivative=False),
    *_entries("log_normal_", "log_normal", _log_normal),
    *_entries("exponential_", "exponential", samples.exponential),
    *_entries("cauchy_", "cauchy", samples.cauchy),
    *_entries("geometric_", "geometric", samples.geometric),
    *_entries("random_", "random", _random),
    *_entries("bernoulli_.float", "bernoulli.p", _bernoulli, torch.contiguous_format, False),
)
