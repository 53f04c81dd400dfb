"""Places counted over several dims; elements at such places, of which autograd keeps them alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["apart", "counted", "taken"]


def apart(place: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Places that are counted over dims of these lengths, as one per dim; what is beyond the last
    place is beyond the first dim."""
    found: list[Tensor] = []
    for length in reversed(lengths[1:]):
        found.append(place % length)
        place = torch.div(place, length, rounding_mode="floor")
    return [place, *reversed(found)]


def counted(places: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Places in several dims, the last of these lengths, counted over all of them."""
    out = places[0]
    for place, length in zip(places[1:], lengths[1 - len(places) :]):
        out = out * length + place
    return out


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
