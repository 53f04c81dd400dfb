"""What ranks without elements do: they keep their place in the graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.rules import Boxed, Call, OnRank

__all__ = ["empty_summary", "unless_idle"]


def unless_idle(call: Call, boxed: Boxed) -> OnRank:
    """The op itself, which would warn, or have another graph, on a rank with an empty result."""
    return None, boxed.args, boxed.kwargs


def empty_summary(x: Tensor, dims: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The summary of an empty block: zero, with a graph edge to the block, so that
    every rank takes part in the backward of what is gathered."""
    return x.sum(tuple(dims), keepdim=True).to(dtype)
