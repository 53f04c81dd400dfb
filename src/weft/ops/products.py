"""Products whose dtype torch lets depend on lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.ops.algorithm import Composite
from weft.rules import Call

__all__ = ["einsum_lookup"]


def einsum_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Composite | None:
    """`einsum` of integers and bools, all of them in the dtype of the result.

    torch sums what one operand alone has as int64, unless it has length 1: a shard of one element
    would have another dtype than its peers.
    """
    dtype = call.results[0].dtype
    if all(tensor.dtype == dtype for tensor in call.tensors):
        return None
    wide = getattr(torch, dtype)

    def function(equation: str, tensors: Sequence[Tensor], **named: Any) -> Tensor:
        return torch.einsum(equation, *[tensor.to(wide) for tensor in tensors])

    return Composite(function)
