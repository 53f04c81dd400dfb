"""Ops inside torch's own gradients and compositions, expressed by the ops that define them.

Users rarely call them. The ops that define them have rules, so shards stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops.summaries import wide
from weft.rules import op, page, rule
from weft.transport import Shards

__all__ = ["PAGE"]


def _softmax_backward(
    shards: Shards, grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """Products, and one sum over all shards."""
    output = output.to(wide(output.dtype))
    terms = grad.to(output.dtype) * output
    return (terms - output * shards.psum(terms.sum(dim, keepdim=True))).to(input_dtype)


def _log_softmax_backward(
    shards: Shards, grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """Products, and one sum over all shards."""
    output = output.to(wide(output.dtype))
    grad = grad.to(output.dtype)
    return (grad - output.exp() * shards.psum(grad.sum(dim, keepdim=True))).to(input_dtype)


def _chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int) -> Tensor:
    """Every tensor padded to chunks of equal length, and these side by side: the dim of the
    chunks stays sharded by whole chunks; later dims are exchanged."""
    dim = dim % tensors[0].dim()
    parts = []
    for one in tensors:
        length = one.shape[dim]
        each = (length + num_chunks - 1) // num_chunks
        padding = [0, 0] * (one.dim() - 1 - dim) + [0, each * num_chunks - length]
        padded = torch.constant_pad_nd(one, padding)
        parts.append(padded.reshape([*one.shape[:dim], num_chunks, -1]))
    return torch.cat(parts, dim + 1)


def _inside(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        None if index is None else index.clamp(min=0, max=x.shape[at] - 1)
        for at, index in enumerate(indices)
    ]


def _masked_index(
    x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: Any
) -> Tensor:
    """`x[i, j]` at clamped places, then the fill: any dim may be sharded; elements are fetched by
    index, as for `index`."""
    read: Any = torch.ops.aten.index.Tensor
    return read(x, _inside(x, indices)).masked_fill(mask.logical_not(), fill)


def _masked_index_put(
    x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor
) -> Tensor:
    """Values added at clamped places, masked values as zeros: any dim may be sharded; elements are
    sent by index, as for `index_put`."""
    write: Any = torch.ops.aten.index_put.default
    return write(x, _inside(x, indices), values.masked_fill(mask.logical_not(), 0), True)


_SOFTMAX = rule("... s~, ... s~ -> ... s", along="dim", linear=[0])

PAGE = page(
    op("_softmax_backward_data", _SOFTMAX, kernel=_softmax_backward),
    op("_log_softmax_backward_data", _SOFTMAX, kernel=_log_softmax_backward),
    op("_chunk_cat", compose=_chunk_cat),
    op("_unsafe_masked_index", compose=_masked_index),
    op("_unsafe_masked_index_put_accumulate", compose=_masked_index_put),
)
