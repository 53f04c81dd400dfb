"""Losses of whole sequences, of which each of a batch is by itself: ctc_loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Local, replicated
from weft.ops.blocks.summaries import left
from weft.rules import Call, Decision

__all__ = ["ctc_lookup"]

_NONE, _MEAN = 0, 1  # torch's numbers for reduction=


def ctc_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local | Decision:
    """`ctc_loss` of a cut batch: each shard its own sequences; a mean weighs by true counts"""
    scores, targets, *lengths = layouts
    axes, cuts = (), None
    if scores.ndim == 3:
        axes, cuts = scores.dims[1], scores.cuts[1]
        if not axes and targets.ndim == 2:
            axes, cuts = targets.dims[0], targets.cuts[0]
    if not axes:
        return replicated(call, layouts)
    mesh, num = scores.mesh, scores.shape[1]
    x = Layout.make(mesh, scores.shape, ((), axes, ()), (None, cuts, None))
    line = Layout.make(mesh, (num,), (axes,), (cuts,))
    goals = Layout.replicated(mesh, targets.shape)
    if targets.ndim == 2:
        goals = Layout.make(mesh, targets.shape, (axes, ()), (cuts, None))
    reduction = call.args[5]
    result = line if reduction == _NONE else left((), line, (0,), False, "sum")
    operands = (x, goals, *(Layout.replicated(mesh, one.shape) for one in lengths))
    named = call.args[2:4]

    def bind(bound: BoundMesh) -> Callable[..., Tensor]:
        assert bound.here is not None
        start, stop = line.interval(0, line.shard_index(0, bound.here))

        def local(scores: Tensor, goals: Tensor, *lengths: Tensor) -> Tensor:
            have = iter(lengths)
            inputs, sizes = (
                next(have).tolist() if not isinstance(one, (list, tuple)) else list(one)
                for one in named
            )
            if goals.dim() == 1:
                goals = goals[sum(sizes[:start]) : sum(sizes[:stop])]
            return _own(scores, goals, inputs[start:stop], sizes[start:stop])

        return local

    def _own(scores: Tensor, goals: Tensor, inputs: list[int], sizes: list[int]) -> Tensor:
        if not inputs:
            each = scores.sum((0, 2))
        else:
            loss: Any = torch.ops.aten.ctc_loss.IntList
            each = loss(scores, goals, inputs, sizes, call.args[4], _NONE, call.args[6])
        if reduction == _NONE:
            return each
        if reduction == _MEAN:
            counts = torch.tensor(sizes, dtype=each.dtype, device=each.device)
            each = each / counts.clamp(min=1) / num
        return each.sum()

    return Local(Decision(operands, (result,)), bind)
