"""Ops on places whose number depends on the data: repeats told by a tensor, classes that are not.

The numbers are read (from all ranks, where they are cut: there is one for each row), and the op is
one whose sizes are known.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.tensor.shard_tensor import ShardTensor

__all__ = ["one_hot", "repeat_interleave"]


def repeat_interleave(
    input: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """`repeat_interleave(x, repeats, dim)` with repeats for each place: a read by index.

    Raises:
        RuntimeError: negative repeats, or another number of them than the dim has places.
    """
    if repeats is None:  # the places themselves
        counts, length = input, input.shape[0]
    else:
        counts = repeats
        if dim is None:
            input, dim = input.reshape(-1), 0
        length = input.shape[dim]
    if type(counts) is ShardTensor:
        counts = counts.detach().full_tensor()
    assert isinstance(counts, Tensor)
    counts = counts.expand(length) if counts.numel() == 1 else counts
    if counts.shape != (length,):
        raise RuntimeError("repeats must have the same size as input along dim, but got "
                           f"repeats.size(0) = {len(counts)} and input.size({dim}) = {length}")
    places = torch.repeat_interleave(counts, output_size=output_size)
    if repeats is None:
        assert type(input) is ShardTensor
        return ShardTensor.from_local(places, input.device_mesh, None)
    assert dim is not None
    return input.index_select(dim, places)


def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """`one_hot(x)` of as many classes as the largest of them says."""
    if input.numel() == 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    return F.one_hot(input, int(input.max()) + 1)
