"""The memory order of an op's results, if other ops or a kernel on a shard compute them.

Stride order is part of a result: it must be that of the op itself on meta tensors of the global
shape. A composition may give another order. So may a kernel on a shard: if the shard has length 1
in a dim, its strides do not show the order of the global tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.ops import Composite
from weft.tensor.meta import Meta
from weft.tensor.trace.trees import map_tensors
from weft.transport.order import full_order, in_order, order_of

__all__ = ["match_stride_order", "is_last"]


def match_stride_order(composite: Composite, results: Sequence[torch.Tensor]) -> Composite:
    """The composition, with results in the memory order of the op's own."""
    orders = [(one.dim(), full_order(one.shape, one.stride())) for one in results]
    function = composite.function

    def run(*args: Any, **kwargs: Any) -> Any:
        feed = iter(orders)

        def lay(one: torch.Tensor) -> torch.Tensor:
            ndim, order = next(feed)
            return in_order(one, order) if one.dim() == ndim else one

        return map_tensors(lay, function(*args, **kwargs))

    return replace(composite, function=run)


def is_last(meta: Meta) -> bool:
    """Whether channels come last in memory. Kernels read this from the strides of a shard, which
    show nothing if it has one channel, or one place."""
    ndim = len(meta.shape)
    return meta.strides is not None and ndim in (4, 5) and (
        order_of(meta.shape, meta.strides) == (0, *range(2, ndim), 1)
    )
