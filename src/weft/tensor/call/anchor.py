"""Graph edges of results on a rank whose shard is empty.

torch's kernels may drop edges of empty tensors. A transition behind a dropped edge would leave the
other ranks waiting. So the results are tied to the operands that get a gradient on other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.tensor.trace.derivatives import Constant
from weft.tensor.trace.trees import map_tensors

__all__ = ["tie", "tied"]


def tied(out: Any, anchor: Sequence[Sequence[int]], locals_: Sequence[torch.Tensor]) -> Any:
    """The results with graph edges, each to the operands that `anchor` names for it."""
    each = iter(anchor)
    return map_tensors(lambda one: tie(one, [_end(locals_[at], at) for at in next(each)]), out)


def _end(local: torch.Tensor, at: int) -> torch.Tensor:
    """What the result is tied to: where its gradient is a constant on the other ranks, it is one
    here, too, and has no gradient of its own."""
    if type(at) is not Constant:
        return local
    nothing = torch.atleast_1d(local).narrow(0, 0, 0)
    return (torch.view_as_real(nothing) if nothing.is_complex() else nothing).round()


def tie(one: torch.Tensor, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result with a graph edge to each of these operands."""
    if not locals_ or not (one.is_floating_point() or one.is_complex()):
        return one
    # Sums of no elements: zero whatever the elements are.
    zero: Any = sum(torch.atleast_1d(local).narrow(0, 0, 0).sum() for local in locals_)
    if zero.is_complex() and not one.is_complex():
        zero = zero.real
    return one + zero.to(one.dtype)
