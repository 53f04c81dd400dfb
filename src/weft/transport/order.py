"""The memory order of a tensor's dims, which a rank's block shares with the global tensor.

Data is sent in the order of the dims, because all ranks know that order. Only the place of a
block in memory follows from strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

__all__ = [
    "Gaps", "Order", "full_order", "gaps_of", "in_order", "laid", "memory_order", "order_due",
    "order_of", "shares_elements", "strides_apart", "strides_in_order",
    "strides_like",
]

Order = tuple[int, ...]
"""Dims from the largest stride to the smallest."""


Gaps = tuple[tuple[int, int], ...]
"""Dims of which a tensor is a part of a longer line, each with the dim outside of it in memory."""


def order_of(shape: Sequence[int], strides: Sequence[int]) -> Order | None:
    """The order of these strides; None if it is that of the dims.

    Dims of one element have no order and are left out. Expanded dims come first: when
    they get memory of their own, the others stay side by side.
    """
    dims = [dim for dim in range(len(shape)) if shape[dim] > 1]
    order = sorted(dims, key=lambda dim: -strides[dim] if strides[dim] else -math.inf)
    return None if order == dims else tuple(order)


def full_order(shape: Sequence[int], strides: Sequence[int]) -> Order:
    """The order of these strides, even if it is that of the dims."""
    return order_of(shape, strides) or tuple(range(len(shape)))


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The dims from the largest stride to the smallest."""
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    return tuple(order)


def gaps_of(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> Gaps | None:
    """Where a tensor of these strides has gaps, as a part of a dense one; None if it is no such
    part. Then the stride of the outer dim is that of the dim times the length of the longer line.
    """
    if not order:
        return ()
    gaps: list[tuple[int, int]] = []
    dim = order[-1]
    if strides[dim] != 1:
        return None
    for outer in order[-2::-1]:
        step, line = strides[dim], max(shape[dim], 1)
        if strides[outer] != step * line:
            if strides[outer] < step * line or strides[outer] % step:
                return None
            gaps.append((dim, outer))
        dim = outer
    return tuple(gaps)


def shares_elements(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements may share memory, as those of windows that overlap do; what is expanded does
    not count."""
    reach = 0
    for step, length in sorted(zip(strides, shape)):
        if step and length > 1:
            if step <= reach:
                return True
            reach += step * (length - 1)
    return False


def strides_in_order(
    shape: Sequence[int], order: Sequence[int], lines: Mapping[int, int] | None = None
) -> tuple[int, ...]:
    """Strides of a dense tensor whose dims have this order in memory; or of a part of one, whose
    `lines` are longer in some dims."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(lines.get(dim, shape[dim]) if lines else shape[dim], 1)
    return tuple(strides)


def strides_apart(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides in the same order, by which no elements share memory and no dims can be joined; what
    is expanded stays so."""
    order = [dim for dim in memory_order(shape, strides) if strides[dim]]
    return strides_in_order(shape, order, {dim: shape[dim] + 1 for dim in order})


def strides_like(
    shape: Sequence[int], block_shape: Sequence[int], block_strides: Sequence[int]
) -> tuple[int, ...] | None:
    """Strides of a whole of this shape in the order of its block; None if the block has gaps.

    Dims in which the block has one element show no order: they come last.
    """
    order = memory_order(block_shape, [
        step if length > 1 else 0 for length, step in zip(block_shape, block_strides)
    ])
    due = strides_in_order(block_shape, order)
    if any(length > 1 and step != other
           for length, step, other in zip(block_shape, block_strides, due)):
        return None
    return strides_in_order(shape, order)


def in_order(x: Tensor, order: Order) -> Tensor:
    """The tensor itself, or a copy whose dims have this order in memory; differentiable."""
    shape, strides = x.shape, x.stride()
    last = None
    for dim in order:
        if shape[dim] > 1 and strides[dim]:
            if last is not None and strides[dim] > last:
                return laid(x, order)
            last = strides[dim]
    return x


def laid(x: Tensor, order: Order) -> Tensor:
    """The tensor in this order without gaps; itself if it already is; differentiable."""
    there = [*(dim for dim in range(x.dim()) if dim not in order), *order]
    turned = x.permute(there)
    if turned.is_contiguous():
        return x
    return turned.contiguous().permute([there.index(dim) for dim in range(x.dim())])


def order_due(shape: Sequence[int], strides: Sequence[int], block: Tensor) -> Order | None:
    """The order that a block of a tensor with this shape and these strides should have but does
    not; None if it has it. If the whole has no gaps, the block must have none."""
    order = full_order(shape, strides)
    if 0 in block.shape or block.dim() != len(shape):
        return None
    is_dense, step, mine = True, 1, 1
    lies = True
    for dim in reversed(order):
        is_dense = is_dense and (shape[dim] == 1 or strides[dim] == step)
        lies = lies and (block.shape[dim] == 1 or block.stride(dim) == mine)
        step, mine = step * shape[dim], mine * block.shape[dim]
    if is_dense and all(length == 1 or strides[dim] for dim, length in enumerate(shape)):
        return None if lies else order
    return None if in_order(block, order) is block else order
