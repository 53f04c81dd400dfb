"""What ranks without elements do: they keep their place in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.rules import Boxed, Call, OnRank

__all__ = ["empty_summary", "idle", "nothing_of", "unless_idle"]


def nothing_of(out: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of this shape, which has no elements, with the graph of `out`."""
    return out.new_zeros(shape) + out.reshape(-1).narrow(0, 0, 0).sum().to(out.dtype)


def idle(call: Call, boxed: Boxed) -> OnRank:
    """Results without elements, with the graph of the first operand."""
    dtypes = [getattr(torch, result.dtype) for result in call.results]

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = [
            nothing_of(x.real if x.is_complex() and not dtype.is_complex else x, shape)
            if dtype.is_floating_point or dtype.is_complex else x.new_zeros(shape, dtype=dtype)
            for shape, dtype in zip(boxed.shapes, dtypes)
        ]
        return tuple(found) if len(found) > 1 else found[0]

    return run, boxed.args, boxed.kwargs


def unless_idle(call: Call, boxed: Boxed) -> OnRank:
    """The op itself, where it would warn, or have another graph, without elements."""
    return idle(call, boxed) if boxed.is_idle else (None, boxed.args, boxed.kwargs)


def empty_summary(x: Tensor, dims: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The summary of an empty block: zero, with a graph edge to the block, so that
    every rank takes part in the backward of what is gathered."""
    return x.sum(tuple(dims), keepdim=True).to(dtype)
