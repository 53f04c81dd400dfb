"""The order in memory of what an op gives, where other ops compute it, or full tensors.

An op's kernel may give a result whose dims lie in another order than those of what weft composes
the op of. Stride order is part of a result, so it is what the op itself gives for meta tensors. The
other way round, an op that reads memory as it lies must find it as the global tensor says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.ops import Composite
from weft.tensor.trace.capture import map_tensors

__all__ = ["as_laid", "lies_as", "order_of"]


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dims from the largest stride to the smallest, without those that say nothing."""
    shape, stride = tensor.shape, tensor.stride()
    dims = [dim for dim in range(len(shape)) if shape[dim] > 1 and stride[dim]]
    return tuple(sorted(dims, key=lambda dim: -stride[dim]))


def lies_as(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The tensor itself, or a copy whose dims have this order in memory; differentiable."""
    mine = order_of(tensor)
    if mine == tuple(order) or sorted(mine) != sorted(order):
        return tensor
    rest = [dim for dim in range(tensor.dim()) if dim not in order]
    there = [*rest, *order]
    if there == sorted(there):
        return tensor.contiguous()
    back = [there.index(dim) for dim in range(tensor.dim())]
    return tensor.permute(there).contiguous().permute(back)


def as_laid(composite: Composite, results: Sequence[torch.Tensor]) -> Composite:
    """The composition, its results in the order in memory of the op's own."""
    orders = [order_of(one) for one in results]
    function = composite.function

    def run(*args: Any, **kwargs: Any) -> Any:
        feed = iter(orders)
        return map_tensors(lambda one: lies_as(one, next(feed)), function(*args, **kwargs))

    return replace(composite, function=run)
