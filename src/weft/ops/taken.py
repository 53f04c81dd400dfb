"""Elements at places of a tensor, of which autograd keeps the places alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["taken"]


def taken(x: Tensor, places: Tensor) -> Tensor:
    """The elements at these places, counted over all dims of a tensor.

    torch's `gather` and `take` would keep the tensor, a box of which nobody else has a use, until
    the backward.
    """
    return _Taken.apply(x, places)  # type: ignore[no-any-return]


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return x.reshape(-1)[places]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _Put.apply(grad, *ctx.saved_tensors, ctx.shape), None


class _Put(torch.autograd.Function):
    """Zeros, to which values are added at some places."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, values: Tensor, places: Tensor, shape: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(places)
        out = values.new_zeros(shape)
        out.view(-1).index_put_((places,), values, accumulate=True)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _Taken.apply(grad, *ctx.saved_tensors), None, None
