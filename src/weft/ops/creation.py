"""Tensors made beside another tensor, whose elements are not read: its layout stays where the shape
is its shape, and of partial values only the shape counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.rules import Call, Decision, op, page, rule

__all__ = ["PAGE"]


def _like(call: Call, layouts: Sequence[Layout], wants_grad: Any) -> Decision:
    """The operand's layout, without moving it; replicated where the shape differs."""
    first, *others = layouts
    shape = call.results[0].shape
    same = shape == first.shape
    result = first.without_partial() if same else Layout.replicated(first.mesh, shape)
    rest = tuple(Layout.replicated(first.mesh, layout.shape) for layout in others)
    return Decision((first, *rest), (result,), by_form=True)


def _zero(call: Call, layouts: Sequence[Layout], wants_grad: Any) -> Decision:
    """`x.zero_()`: partial values of zero, whatever the kind, reduce to zero."""
    return Decision(tuple(layouts), tuple(layouts), by_form=True)


def _new(call: Call, layouts: Sequence[Layout], wants_grad: Any) -> Decision:
    """Of as many dims as the operand, it is sharded in those that are as long; else replicated."""
    (layout,), shape = layouts, call.results[0].shape
    result = Layout.replicated(layout.mesh, shape)
    if len(shape) == layout.ndim:
        alike = [length == own for length, own in zip(shape, layout.shape)]
        result = result.replace(
            dims=tuple([axes if same else () for axes, same in zip(layout.dims, alike)]),
            cuts=tuple([cuts if same else None for cuts, same in zip(layout.cuts, alike)]))

    def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        source, _, *rest = call.args
        return (source, result.local_shape_at(coordinate), *rest), {**call.kwargs}

    return Decision((layout,), (result,), args)


def _strided(x: Tensor, size: Sequence[int], stride: Sequence[int], **options: Any) -> Tensor:
    """Memory in x's layout where the shape is x's, in the order of the strides."""
    order = sorted(range(len(size)), key=lambda dim: (-stride[dim], -size[dim]))
    if tuple(size) == tuple(x.shape):
        made = torch.empty_like(x.permute(order), memory_format=torch.contiguous_format, **options)
    else:
        made = x.new_empty([size[dim] for dim in order], **options)
    return made.permute([order.index(dim) for dim in range(len(size))])


PAGE = page(
    op("empty_like fill full_like ones_like zeros_like", layouts=_like),
    op("zero", layouts=_zero),
    op("new_empty new_full new_ones new_zeros", layouts=_new),
    op("new_empty_strided", compose=_strided),
    op("linspace logspace", rule("{} -> n!")),
)
