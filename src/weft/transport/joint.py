"""Several operands of one call move together: one node of autograd's graph, joint reductions.

A Python node costs more than the small operations around it, and on a real network each
reduction costs its latency: the gradients of a weight and of its bias come at the same time
and go as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import Communicator
from weft.transport.traffic import STATE, note, resume
from weft.transport.transition import Transition

__all__ = ["move_together"]


def move_together(transitions: Sequence[Transition], xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """`[transition(x) for ...]`, for tensors that require grad while autograd records."""
    if len(xs) == 1 or any(transition.is_special for transition in transitions):
        return [transition(x) for transition, x in zip(transitions, xs)]
    return _apply(transitions, *xs)


class _Together(torch.autograd.Function):
    """Transitions as one node; its backward is the reverse transitions, in order."""

    @staticmethod
    def forward(ctx: Any, transitions: Sequence[Transition], *xs: Tensor) -> Any:
        ctx.transitions = transitions
        ctx.note = note() if STATE.on else None
        ctx.set_materialize_grads(False)
        return tuple([transition.as_node(x) for transition, x in zip(transitions, xs)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        if STATE.on:
            with resume(ctx.note, f"gradient of {ctx.transitions[0].text}"):
                return None, *_reversed(ctx.transitions, grads)
        return None, *_reversed(ctx.transitions, grads)


_apply: Any = super(torch.autograd.Function, _Together).apply  # type: ignore[misc]
"""As in `transition`: a run refuses the tensors of functorch transforms."""


def _reversed(
    transitions: Sequence[Transition], grads: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    first = (transitions[0]._reverse or transitions[0].reverse).reduction
    if first is not None and not STATE.on:
        for transition, grad in zip(transitions, grads):
            reverse = transition._reverse or transition.reverse
            if grad is None or grad.requires_grad or reverse.reduction != first:
                break
        else:  # a weight and its bias: the usual case, without the bookkeeping below
            return first[0].all_reduce_together(grads, first[1])  # type: ignore[arg-type]
    out: list[Tensor | None] = list(grads)
    joint: dict[tuple[Communicator, str], list[int]] = {}
    for place, (transition, grad) in enumerate(zip(transitions, grads)):
        if grad is None:
            continue
        reverse = transition._reverse or transition.reverse
        reduction = reverse.reduction
        if reduction is None or grad.requires_grad:
            out[place] = reverse(grad)
            continue
        if STATE.on:
            reverse.report(grad.element_size())
        joint.setdefault(reduction, []).append(place)
    for (comm, kind), places in joint.items():
        totals = comm.all_reduce_together([grads[place] for place in places], kind)  # type: ignore[misc]
        for place, total in zip(places, totals):
            out[place] = total
    return out
