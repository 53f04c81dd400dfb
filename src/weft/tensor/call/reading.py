"""Calls that read numbers of their operands before they know what they are: how often to repeat,
how many classes there are, whether a variance is negative.

What is read comes from all ranks, where it is cut; the rest is an op whose sizes are known.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.precision import widened
from weft.tensor.call.dispatch import mesh_of
from weft.tensor.call.fallback import runner
from weft.tensor.shard_tensor import ShardTensor

__all__ = [
    "combinations", "ctc_loss", "gaussian_nll_loss", "left_aligned", "one_hot",
    "repeat_interleave",
]


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


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """`combinations(x)`: a read by index, whose places torch finds by a mask."""
    places = torch.arange(input.shape[0], device=input.device)
    return input[torch.combinations(places, r, with_replacement).long()]


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Tensor:
    """`ctc_loss` of lengths that are tensors, which torch reads as well; under autocast of single
    precision, as torch's."""
    lengths = input_lengths, target_lengths
    loss: Any = F.ctc_loss
    kind, rest = log_probs.device.type, (blank, reduction, zero_infinity)
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return loss(widened(log_probs), targets, *lengths, *rest)
    if not any(isinstance(one, Tensor) for one in lengths):  # there is no kernel for its dtype
        args = log_probs, targets, *lengths, *rest
        metas = [one._meta for one in args if type(one) is ShardTensor]
        return runner(mesh_of("ctc_loss", metas), "torch has no kernel for it")(loss, args, {})
    inputs, sizes = (one.tolist() if isinstance(one, Tensor) else one for one in lengths)
    return loss(log_probs, targets, inputs, sizes, *rest)


def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """`one_hot(x)` of as many classes as the largest of them says."""
    if input.numel() == 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    return F.one_hot(input, int(input.max()) + 1)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """As torch's own, whose Python looks at the variances.

    Raises:
        ValueError: a negative variance, variances of another size, an unknown reduction.
    """
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if bool((var.detach() < 0).any()):
        raise ValueError("var has negative entry/entries")
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.ndim != var.ndim or sum(
            mine for due, mine in zip(input.shape, var.shape) if mine != due
        ) != 1:  # as torch has it: one dim differs, and is 1
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not valid")
    var = torch.where(var < eps, var - var.detach() + eps, var)  # clamped, but for the gradient
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def left_aligned(x: Tensor, mask: Tensor) -> bool:
    """`_nested_tensor_from_mask_left_aligned(x, mask)`: whether what a mask of rows keeps stands
    at their beginning. Of `x`, nothing but the shape is read."""
    if mask.dtype is not torch.bool or mask.shape != x.shape[:2]:
        metas = [torch.empty(one.shape, dtype=one.dtype) for one in (x, mask)]
        return torch._nested_tensor_from_mask_left_aligned(*metas)  # raises
    places = torch.arange(mask.shape[1], device=mask.device)
    return bool((mask == (places < mask.sum(1, keepdim=True))).all())
