"""Tensors made beside another tensor, whose elements are not read: its layout stays in dims of
about its length, and of partial values only the shape counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.rules import Call, Shift, Table, op, page, rule

__all__ = ["PAGE"]


def _new(call: Call, wants_grad: Any) -> str:
    """Sharded as the operand in dims of the same length, in proportion in longer ones and in those
    of at least half the length. Other dims are whole, as are those that the operand lacks."""
    shape = call.results[0].shape
    given, made = ([f"{name}{dim}!" for dim in range(len(shape))] for name in "xy")
    aligned = _aligned(call)
    if not aligned:
        return f"* -> {' '.join(made)}"
    for dim, own, length in aligned:
        if own <= 2 * length + 1:  # a border, a coarser or a finer grid
            made[dim] = f"x{dim}"
            given[dim] = made[dim] if own == length else f"@{made[dim]}"
    return f"*{' '.join([given[dim] for dim, *_ in aligned])} -> {' '.join(made)}"


def _aligned(call: Call) -> list[tuple[int, int, int]]:
    """For each dim of the operand: the dim of the result, the operand's length and the result's.
    Dims are counted from the last, as of a stack; from the first if only there all lengths are the
    operand's, as of columns. Empty if the result is none of these, and has not as many dims."""
    own, shape = call.tensors[0].shape, call.results[0].shape
    before = len(shape) - len(own)
    if before and not own:
        return []
    if before > 0 and shape[: len(own)] == own != shape[before:]:
        before = 0
    elif before and not (before > 0 and own[0] == shape[before] and all(
        mine <= length <= 2 * mine for mine, length in zip(own, shape[before:])
    )):
        return []
    return [(before + dim, mine, shape[before + dim]) for dim, mine in enumerate(own)]


def _in_proportion(call: Call) -> Mapping[str, Table | Shift]:
    return {
        f"x{dim}": Table(range(length), range(1, length + 1), own)
        for dim, own, length in _aligned(call)
    }


def _strided(x: Tensor, size: Sequence[int], stride: Sequence[int], **options: Any) -> Tensor:
    """Memory in x's layout where the shape is x's, in the order of the strides."""
    order = sorted(range(len(size)), key=lambda dim: (-stride[dim], -size[dim]))
    if tuple(size) == tuple(x.shape):
        made = torch.empty_like(x.permute(order), memory_format=torch.contiguous_format, **options)
    else:
        made = x.new_empty([size[dim] for dim in order], **options)
    return made.permute([order.index(dim) for dim in range(len(size))])


PAGE = page(
    op("empty_like full_like ones_like zeros_like", rule("*..., [] -> ..."), detaches=True),
    op("fill", rule("*..., [] -> ...")),
    op("zero", rule("... -> ...", linear=[0], moves=True)),
    op("new_empty new_full new_ones new_zeros", rule(_new, sizes="size", by_size=True,
                                                     tables=_in_proportion), detaches=True),
    op("new_empty_strided", compose=_strided),
    op("linspace logspace", rule("{} -> n!")),
)
