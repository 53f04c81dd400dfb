"""The order in memory of a tensor's dims, which a rank's block shares with the global tensor.

What ranks send lies in the order of the dims, because all of them know that; only where a block
comes to lie follows from strides.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["Order", "in_order", "order_of"]

Order = tuple[int, ...]
"""Dims from the one that steps farthest in memory to the one that steps least."""


def order_of(shape: Sequence[int], strides: Sequence[int]) -> Order | None:
    """The order of these strides; None where it is that of the dims.

    Dims of one element, and those that are expanded, say nothing: they are left out.
    """
    dims = [dim for dim in range(len(shape)) if shape[dim] > 1 and strides[dim]]
    order = sorted(dims, key=lambda dim: -strides[dim])
    return None if order == dims else tuple(order)


def in_order(x: Tensor, order: Order) -> Tensor:
    """The tensor itself, or a copy whose dims lie in this order; differentiable."""
    shape, strides = x.shape, x.stride()
    last = None
    for dim in order:
        if shape[dim] > 1 and strides[dim]:
            if last is not None and strides[dim] > last:
                break
            last = strides[dim]
    else:
        return x
    there = [*(dim for dim in range(len(shape)) if dim not in order), *order]
    back = [there.index(dim) for dim in range(len(shape))]
    return x.permute(there).contiguous().permute(back)
