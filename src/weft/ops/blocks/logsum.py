"""logsumexp over cut dims: each block's maximum, and its sum of exponentials below that."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core import Layout
from weft.ops.algorithm import Algorithm
from weft.ops.blocks.summaries import Blocks, dtype_of, finish, is_cut, nothing_of, reduced, wide
from weft.rules import Call

__all__ = ["exp_sums", "log_of_sums", "logsumexp_lookup"]


def exp_sums(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The maximum of a block (without gradient) and sum exp(x - maximum), dims kept.

    Where the maximum is infinite, 0 stands for it in the sum.
    """
    dims = tuple(dims)
    if any(x.shape[dim] == 0 for dim in dims):
        none = nothing_of(x, dims, x.dtype)
        return none.detach() - torch.inf, none
    largest = x.detach().amax(dims, keepdim=True)
    return largest, (x - _finite(largest)).exp().sum(dims, keepdim=True)


def log_of_sums(largest: Tensor, sums: Tensor) -> Tensor:
    """The logsumexp of blocks, from what `exp_sums` gives, stacked in dim 0."""
    largest = largest.detach()
    top = _finite(largest.amax(0))
    return (sums * (_finite(largest, below=True) - top).exp()).sum(0).log() + top


def _finite(largest: Tensor, below: bool = False) -> Tensor:
    """0 for infinite maxima, which `exp_sums` left out; -inf stays where `below`: it weighs 0."""
    infinite = largest.isposinf() if below else largest.isinf()
    return torch.where(infinite, 0.0, largest)


def logsumexp_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """logsumexp over cut dims that have elements."""
    layout, dtype = layouts[0], dtype_of(call)
    dims, keepdim = reduced(layout, call.args[1]), bool(call.args[2])
    if not is_cut(layout, dims) or dtype.is_complex or not all(layout.shape[d] for d in dims):
        return None

    def function(blocks: Blocks, x: Tensor) -> Tensor:
        largest, sums = blocks.gather(*exp_sums(x.to(wide(dtype)), dims))
        return log_of_sums(largest, sums).to(dtype)

    return finish(call, layout, dims, keepdim, function)
