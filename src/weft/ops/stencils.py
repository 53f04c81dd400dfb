"""gradient: differences of neighbours along dims. Along a sharded dim only borders are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.ops.algorithm import Composite
from weft.rules import Call, op, page, rule

__all__ = ["PAGE"]


def _text(call: Call, wants_grad: Any) -> str:
    """The places of the elements of a dim are whole."""
    places = "".join([f", place{at}!" for at in range(len(call.tensors) - 1)])
    return f"... s!{places} -> {{... s}}"


def _along_sharded(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Composite | None:
    """Later elements less earlier ones, where a dim of the differences is sharded."""
    x = layouts[0]
    dims = _dims(x.ndim, call.get("dim"))
    return Composite(_gradient) if any(x.dims[dim] for dim in dims) else None


def _dims(ndim: int, dim: Any) -> list[int]:
    if dim is None:
        return [*range(ndim)]
    return [at % ndim for at in ([dim] if isinstance(dim, int) else dim)]


def _gradient(
    x: Tensor, *, spacing: Any = None, dim: Any = None, edge_order: int = 1
) -> list[Tensor]:
    """Central differences inside, one-sided ones of the order that is asked for at both ends."""
    dims = _dims(x.dim(), dim)
    steps = [*spacing] if isinstance(spacing, (list, tuple)) else [spacing] * len(dims)
    return [_along(x, at, 1 if step is None else step, edge_order)
            for at, step in zip(dims, steps)]


def _along(x: Tensor, dim: int, step: Any, edge_order: int) -> Tensor:
    num = x.shape[dim]

    def part(start: int, length: int) -> Tensor:
        return x.narrow(dim, start, length)

    def mixed(weights: Sequence[Any], start: int, length: int) -> Tensor:
        """The sum of neighbours by weights, the first of them beginning at `start`."""
        total = part(start, length) * weights[0]
        for at, weight in enumerate(weights[1:], 1):
            total = total + part(start + at, length) * weight
        return total

    if isinstance(step, Tensor):
        inner, ends = _weights(step, x.dim() - 1 - dim, edge_order)
        middle = mixed(inner, 0, num - 2)
    else:
        middle = (part(2, num - 2) - part(0, num - 2)) / (2 * step)
        one_sided = [-1.0, 1.0] if edge_order == 1 else [-1.5, 2.0, -0.5]
        ends = [[weight / step for weight in one_sided],
                [-weight / step for weight in reversed(one_sided)]]
    first, last = mixed(ends[0], 0, 1), mixed(ends[1], num - len(ends[1]), 1)
    return torch.cat([first, middle, last], dim)


def _weights(places: Tensor, behind: int, edge_order: int) -> tuple[list[Any], list[list[Any]]]:
    """The weights of three neighbours inside, and those at both ends, of elements at `places`."""
    steps = places.narrow(0, 1, places.shape[0] - 1) - places.narrow(0, 0, places.shape[0] - 1)
    count = steps.shape[0]
    before, after = steps.narrow(0, 0, count - 1), steps.narrow(0, 1, count - 1)
    both = before + after

    def spread(one: Tensor) -> Tensor:
        return one.reshape(-1, *[1] * behind)

    inner = [-after / (before * both), (after - before) / (before * after), before / (after * both)]
    if edge_order == 1:
        ends = [[-1 / step, 1 / step] for step in (steps.narrow(0, 0, 1), steps.narrow(0, -1, 1))]
    else:
        a, b, c = (one.narrow(0, 0, 1) for one in (before, after, both))
        head = [-(a + c) / (a * c), c / (a * b), -a / (b * c)]
        a, b, c = (one.narrow(0, -1, 1) for one in (before, after, both))
        ends = [head, [b / (a * c), -c / (a * b), (b + c) / (b * c)]]
    return [*map(spread, inner)], [[*map(spread, end)] for end in ends]


PAGE = page(
    op("gradient", rule(_text, along="dim", linear=[0]), layouts=_along_sharded),
)
