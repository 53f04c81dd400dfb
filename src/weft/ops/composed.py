"""Compositions: differences, products, reads and writes of memory as it lies.

Each is torch code that defines the op, so the rules of slices, views and products apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.errors import UnsupportedOpError
from weft.rules import op, page

__all__ = ["PAGE"]


def _vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Any:
    """Products along a new dim: every element has its own line of powers."""
    num = x.shape[-1] if N is None and x.dim() else N
    if x.dim() != 1 or num is None or num < 0:
        return NotImplemented
    x = x if num > 1 else x.detach()
    lines = x.unsqueeze(-1).expand(-1, max(num - 1, 0)).cumprod(-1)
    powers = torch.cat([lines.new_ones(x.shape[0], min(num, 1)), lines], -1)
    return powers if increasing else powers.flip(1)


def _addbmm(
    x: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """One `addmm` of batch and inner dim joined: rows and columns stay sharded, a sharded batch
    leaves partial sums, a sharded inner dim is exchanged."""
    rows = left.transpose(0, 1).reshape(left.shape[1], -1)
    return torch.addmm(x, rows, right.reshape(-1, right.shape[2]), beta=beta, alpha=alpha)


def _combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """A read by index, whose places torch finds by a mask."""
    places = torch.combinations(torch.arange(x.shape[0]), r, with_replacement)
    return x[places.long().to(x.device)]


def _unravel_index(indices: Tensor, shape: Any) -> tuple[Tensor, ...]:
    """Quotients and remainders by numbers, where torch makes tensors of the lengths."""
    lengths = [shape] if isinstance(shape, int) else list(shape)
    usual = indices.dtype not in (torch.bool, torch.uint64) and not (
        indices.is_floating_point() or indices.is_complex()
    )
    if not usual or not all(type(length) is int and length > 0 for length in lengths):
        return NotImplemented
    found, step = [], 1
    for length in reversed(lengths):
        found.append(indices.long().floor_divide(step) % length)
        step *= length
    return tuple(reversed(found))


def _fill_diagonal(x: Any, fill_value: Any, wrap: bool = False) -> Any:
    """By a mask of the diagonal, in the layout of x. For more dims, and for numbers that x's dtype
    would round, torch's own."""
    usual = type(fill_value) in (bool, int) or (
        type(fill_value) is float and (x.is_floating_point() or x.is_complex())
    )
    if x.dim() != 2 or wrap or not usual or x.dtype == torch.bool:
        return NotImplemented
    return x.masked_fill_(torch.ones_like(x, dtype=torch.bool).tril().triu(), fill_value)


def _as_strided_copy(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Elements of the flat tensor by index: each travels once, from the shard that has it."""
    flat, _ = _in_memory(x)
    return flat[_places(x, size, stride, storage_offset)]


def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor:
    """Elements written to the flat tensor by index: each travels once, to the shard that has it.
    Where x has a gradient, torch gives it that of the elements which are replaced."""
    if x.requires_grad and torch.is_grad_enabled():
        return NotImplemented
    flat, order = _in_memory(x)
    out = flat.index_put((_places(x, size, stride, storage_offset),), src)
    back = sorted(range(x.dim()), key=order.__getitem__)
    return out.reshape([x.shape[dim] for dim in order]).permute(back)


def _in_memory(x: Tensor) -> tuple[Tensor, list[int]]:
    """The elements as they lie in memory, without gaps, and the order of the dims there."""
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), dim))
    turned = x.permute(order)
    if not turned.is_contiguous():
        raise UnsupportedOpError(
            "as_strided_copy", f"a tensor of shape {tuple(x.shape)} has the strides "
            f"{x.stride()}", "strides are read of tensors whose elements fill memory, one "
            "after the other", [x.stride()], "x.contiguous(), and strides of that")
    return turned.reshape(-1), order


def _places(
    x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> Tensor:
    """The place in memory of each element of a tensor with these strides."""
    places = torch.full([1] * len(size), offset or 0, device=x.device)
    for dim, (length, step) in enumerate(zip(size, stride)):
        line = torch.arange(length, device=x.device) * step
        places = places + line.reshape(-1, *[1] * (len(size) - 1 - dim))
    return places


def _linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, options: Any = None, **more: Any
) -> Tensor:
    """Without chunks: logits are sharded as the operands are. Torch warns of unusual calls."""
    usual = linear_weight.dim() == 2 and target.dtype is torch.int64 and (
        more.get("reduction", "mean") in ("mean", "sum", "none")
    ) and not more.get("label_smoothing")
    if options is None or not usual:
        return NotImplemented
    return F.linear_cross_entropy(input, linear_weight, target, options=None, **more)


PAGE = page(
    op("combinations", compose=_combinations, each_call=True),
    op("as_strided_copy", compose=_as_strided_copy),
    op("as_strided_scatter", compose=_as_strided_scatter, each_call=True),
    op("torch.nn.functional.linear_cross_entropy", compose=_linear_cross_entropy),
    op("vander", compose=_vander),
    op("addbmm", compose=_addbmm),
    op("torch.unravel_index", compose=_unravel_index),
    op("torch.Tensor.fill_diagonal_", compose=_fill_diagonal),
)
