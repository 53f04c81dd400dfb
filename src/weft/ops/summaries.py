"""Shared by kernels that bring a few numbers of every shard, the *summaries*, to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.ops.precision import HALF, wide

__all__ = ["HALF", "empty_summary", "is_cut", "reduced", "wide"]


def reduced(layout: Layout, dims: Any) -> tuple[int, ...]:
    """The reduced dims, non-negative. None or () means all dims; a number has none."""
    if dims is None or dims == [] or dims == () or not layout.ndim:
        return tuple(range(layout.ndim))
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(sorted({dim % layout.ndim for dim in dims}))


def is_cut(layout: Layout, dims: Sequence[int]) -> bool:
    """Whether some axis shards one of the dims."""
    return any(layout.dims[dim] for dim in dims if dim < layout.ndim)


def empty_summary(x: Tensor, dims: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The summary of an empty block: zero, with a graph edge to the block, so that
    every rank takes part in the backward of what is gathered."""
    return x.sum(tuple(dims), keepdim=True).to(dtype)
