"""Targets of in-place ops: they must share memory with the tensor that they represent, in a dtype
that can hold the result and a layout that can hold its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.core import Layout
from weft.errors import UnsupportedOpError
from weft.tensor.meta import expanded_dims
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.capture import Op, unwatched
from weft.tensor.trace.trees import fill
from weft.tensor.views.inverse import OVERLAP

__all__ = ["check_cast", "check_gradient", "check_overlap", "check_writable"]


def check_writable(name: str, target: torch.Tensor) -> None:
    """Raise UnsupportedOpError if a write would not reach the target's base: a view op that had to
    communicate made it."""
    if type(target) is ShardTensor and target._meta.alias is not None:
        raise UnsupportedOpError(
            name, f"the tensor {target.sharding} came from a view op "
            f"({target._meta.alias}) that had to communicate",
            "a write through a view reaches its base only where they share memory",
            [str(target.sharding)], "write to the base, or clone() the view first")


def check_gradient(name: str, layout: Layout) -> None:
    """Raise UnsupportedOpError for a write of values that require a gradient to a layout that has
    none: partial by max or min."""
    kinds = sorted({
        kind for kind, size in zip(layout.partial, layout.mesh.axis_sizes)
        if kind in ("max", "min") and size > 1
    })
    if kinds:
        raise UnsupportedOpError(
            name, f"it writes values that require a gradient to {layout}",
            "P(max) and P(min) carry no gradient", [f"partial {kind}" for kind in kinds],
            "x = x.redistribute(placements=P()) before, or value.detach()")


def check_overlap(op: Op, metas: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Raise torch's error of a write to elements that share memory: on a rank that has none its
    kernel would not, nor does another kernel that stands for it. Which kernels do is known from
    these themselves, on a few zeros."""
    if type(target) is not ShardTensor or not expanded_dims(target):
        return
    zeros = [_few_like(one) for one in metas]
    with torch.no_grad(), unwatched():
        try:
            op.overload(*fill(op.args, zeros), **fill(op.kwargs, zeros))
        except RuntimeError as error:
            if str(error) == OVERLAP:
                raise


def _few_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of two places in each longer dim, which share memory where the tensor's do."""
    few = [min(length, 2) for length in tensor.shape]
    shared = expanded_dims(tensor)
    own = [1 if dim in shared else length for dim, length in enumerate(few)]
    return torch.zeros(own, dtype=tensor.dtype).expand(few)


def check_cast(
    op: Op, local: Callable[..., Any], metas: Sequence[torch.Tensor], wanted: torch.dtype
) -> None:
    """Raise torch's error if the dtype of the result of `local` cannot be cast to that of the
    target."""
    with torch.no_grad(), unwatched():
        found = local(*fill(op.args, metas), **fill(op.kwargs, metas))
    if not torch.can_cast(found.dtype, wanted):
        raise RuntimeError(f"result type {_words(found.dtype)} can't be cast to the desired "
                           f"output type {_words(wanted)}")


def _words(dtype: torch.dtype) -> str:
    """As torch's messages name a dtype: `Float`."""
    return torch.empty(0, dtype=dtype).type().split(".")[-1].removesuffix("Tensor")
