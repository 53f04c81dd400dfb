"""The order in memory of what an op gives, where other ops compute it, or a kernel on a shard.

Stride order is part of a result, so it is what the op itself gives for meta tensors of the global
shape. What weft composes an op of may give another, and so may a kernel that sees a shard: where
that is one long in a dim, strides do not tell which order the global tensor has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.ops import Composite
from weft.tensor.meta import Meta, is_dense, strides_in_order
from weft.tensor.trace.capture import map_tensors
from weft.transport.order import Order, in_order, order_of

__all__ = ["as_laid", "is_last", "laid", "order_due"]


def as_laid(composite: Composite, results: Sequence[torch.Tensor]) -> Composite:
    """The composition, its results in the order in memory of the op's own."""
    orders = [_order(tuple(one.shape), one.stride()) for one in results]
    function = composite.function

    def run(*args: Any, **kwargs: Any) -> Any:
        feed = iter(orders)
        return map_tensors(lambda one: in_order(one, next(feed)), function(*args, **kwargs))

    return replace(composite, function=run)


def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> Order:
    return order_of(shape, strides) or tuple(range(len(shape)))


def order_due(meta: Meta, local: torch.Tensor) -> Order | None:
    """The order that a local tensor should have, and has not; None where it lies as it should."""
    if meta.strides is None and local.is_contiguous():
        return None
    order = _order(meta.shape, meta.stride())
    if not is_dense(meta):
        return None if in_order(local, order) is local else order
    lengths = tuple(local.shape)
    if 0 in lengths or len(lengths) != len(meta.shape):
        return None
    rest = [dim for dim in range(len(lengths)) if dim not in order]
    due = strides_in_order(lengths, [*rest, *order])
    is_as_due = all(
        length == 1 or mine == other
        for length, mine, other in zip(lengths, local.stride(), due)
    )
    return None if is_as_due else order


def laid(local: torch.Tensor, order: Order) -> torch.Tensor:
    """The tensor in this order, without gaps; itself where it is; differentiable."""
    there = [*(dim for dim in range(local.dim()) if dim not in order), *order]
    turned = local.permute(there)
    if turned.is_contiguous():
        return local
    return turned.contiguous().permute([there.index(dim) for dim in range(local.dim())])


def is_last(meta: Meta) -> bool:
    """Whether channels come last in memory. Kernels tell it by the strides of a shard, which say
    nothing where it has one channel, or one place."""
    ndim = len(meta.shape)
    return meta.strides is not None and ndim in (4, 5) and (
        order_of(meta.shape, meta.strides) == (0, *range(2, ndim), 1)
    )
