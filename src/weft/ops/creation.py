"""Tensors made beside another tensor, whose elements are not read: its layout stays where the shape
is its shape, and of partial values only the shape counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.rules import Call, op, page, rule

__all__ = ["PAGE"]


def _new(call: Call, wants_grad: Any) -> str:
    """Of as many dims as the operand, it is sharded in those that are as long; else replicated."""
    source, shape = call.tensors[0].shape, call.results[0].shape
    if len(source) != len(shape):
        return f"* -> {' '.join([f'y{dim}!' for dim in range(len(shape))])}"
    alike = [length == own for length, own in zip(shape, source)]
    given = [f"x{dim}" if same else f"x{dim}!" for dim, same in enumerate(alike)]
    made = [f"x{dim}" if same else f"y{dim}!" for dim, same in enumerate(alike)]
    return f"*{' '.join(given)} -> {' '.join(made)}"


def _strided(x: Tensor, size: Sequence[int], stride: Sequence[int], **options: Any) -> Tensor:
    """Memory in x's layout where the shape is x's, in the order of the strides."""
    order = sorted(range(len(size)), key=lambda dim: (-stride[dim], -size[dim]))
    if tuple(size) == tuple(x.shape):
        made = torch.empty_like(x.permute(order), memory_format=torch.contiguous_format, **options)
    else:
        made = x.new_empty([size[dim] for dim in order], **options)
    return made.permute([order.index(dim) for dim in range(len(size))])


PAGE = page(
    op("empty_like fill full_like ones_like zeros_like", rule("*..., [] -> ...")),
    op("zero", rule("... -> ...", linear=[0], moves=True)),
    op("new_empty new_full new_ones new_zeros", rule(_new, sizes="size", by_size=True)),
    op("new_empty_strided", compose=_strided),
    op("linspace logspace", rule("{} -> n!")),
)
