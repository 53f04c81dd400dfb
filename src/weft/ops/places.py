"""Places counted over several dims, elements at such places, and dims of other lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.transport.nodes import with_gradient

__all__ = ["apart", "counted", "resized", "taken"]


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
    shape = x.shape
    return with_gradient(
        x, lambda x, places: x.reshape(-1)[places],
        lambda grad, places: _put(grad, places, shape), places)


def _put(values: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Zeros, to which values are added at some places."""
    def do(values: Tensor, places: Tensor) -> Tensor:
        out = values.new_zeros(shape)
        out.view(-1).index_put_((places,), values, accumulate=True)
        return out

    return with_gradient(values, do, taken, places)


def resized(x: Tensor, dim: int, length: int) -> Tensor:
    """With zeros behind the elements of a dim, or without the last ones."""
    if length <= x.shape[dim]:
        return x.narrow(dim, 0, length) if length < x.shape[dim] else x
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [0, length - x.shape[dim]])
