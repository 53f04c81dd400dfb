"""ctc_loss: a loss of whole sequences. The sequences of a batch are independent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.precision import widened
from weft.rules import Call, op, page, rule
from weft.transport import Shards

__all__ = ["PAGE"]

_NONE, _MEAN = 0, 1  # torch's numbers for reduction=


def _rule(call: Call, wants_grad: Sequence[bool]) -> str:
    """The batch may be sharded; a reduction over it leaves partial sums."""
    scores, *others = call.tensors
    batch = ("n~" if call.get("reduction") == _NONE else "n~:sum") if len(scores.shape) == 3 else ""
    whole = [" ".join([f"x{place}_{dim}!" for dim in range(len(one.shape))])
             for place, one in enumerate(others)]
    if batch and len(others[0].shape) == 2:
        whole[0] = f"{batch} s!"
    return f"t! {batch} c!, {', '.join(whole)} -> {batch[:1] if call.results[0].shape else ''}"


def _ctc_loss(
    shards: Shards, scores: Tensor, goals: Tensor, inputs: Any, sizes: Any, blank: int = 0,
    reduction: int = _MEAN, zero_infinity: bool = False,
) -> Tensor:
    """Each shard takes its own sequences; a mean divides by their global number."""
    start = shards.starts[1]
    mine = slice(start, start + scores.shape[1])
    inputs, sizes = (one.tolist() if isinstance(one, Tensor) else one for one in (inputs, sizes))
    if goals.dim() == 1:
        goals = goals[sum(sizes[:start]) : sum(sizes[: mine.stop])]
    inputs, sizes = list(inputs[mine]), list(sizes[mine])
    if inputs:
        loss: Any = torch.ops.aten.ctc_loss.IntList
        each = loss(scores, goals, inputs, sizes, blank, _NONE, zero_infinity)
    else:
        each = scores.sum((0, 2))
    if reduction == _NONE:
        return each
    if reduction == _MEAN:
        counts = torch.tensor(sizes, dtype=each.dtype, device=each.device)
        each = each / counts.clamp(min=1) / shards.layout.shape[1]
    return each.sum()


def _function(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Tensor:
    """Lengths that are tensors are read, as torch reads them. Under autocast in single precision.

    The backward reads losses of its own through a pointer for writing, which ends in an error of
    torch where they share memory until written to (`full_tensor`): so what is given is a copy.
    """
    lengths = input_lengths, target_lengths
    loss: Any = F.ctc_loss
    kind, rest = log_probs.device.type, (blank, reduction, zero_infinity)
    if kind != "meta" and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return loss(widened(log_probs), targets, *lengths, *rest)
    copies = reduction == "none"
    if not copies and not any(isinstance(one, Tensor) for one in lengths):
        return NotImplemented
    inputs, sizes = (one.tolist() if isinstance(one, Tensor) else one for one in lengths)
    if copies:
        each: Any = torch.ctc_loss
        return each(log_probs, targets, inputs, sizes, blank, _NONE, zero_infinity).clone()
    return loss(log_probs, targets, inputs, sizes, *rest)


PAGE = page(
    op("ctc_loss", rule(_rule), kernel=_ctc_loss, has_meta_gradient=False),
    op("torch.nn.functional.ctc_loss", compose=_function),
)
