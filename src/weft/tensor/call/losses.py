"""Losses made of other losses: `loss / num_batches`, `main + 0.1 * other`, a scaled loss.

`backward` makes the value of its loss known on every rank, by the collective that reduces the
gradients. A program that prints on one rank may also ask for the loss before it was scaled. So a
tensor made of partial losses keeps their partial values, and a backward reduces these, too.

A loss keeps partial values, not tensors. So a chain of losses does not keep all earlier ones, and
no use of a tensor on one rank changes a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from weft.tensor.call.recipe import Recipe
from weft.tensor.meta import Meta
from weft.tensor.placing.redistribute import to_replicated
from weft.tensor.shard_tensor import ShardTensor, version_of
from weft.tensor.trace.trees import flatten
from weft.transport.transition import Transition

__all__ = ["JoiningLosses", "joins_losses"]

_MAX_TERMS = 8


class _Term(NamedTuple):
    """A partial loss: this rank's value, and the cell (version, value or None) that gets the
    sum."""

    local: torch.Tensor
    transition: Transition
    known: list[Any]


def _holds_losses(meta: Meta) -> bool:
    """Whether it may be made of losses: one number, or a stack of partial ones."""
    stacked = len(meta.shape) == 1 and meta.layout.is_partial
    return meta.shape.numel() <= (_MAX_TERMS if stacked else 1)


def joins_losses(key: Sequence[Any]) -> bool:
    """Whether all operands of a call with such a key may be losses, and autograd records it."""
    if not torch.is_grad_enabled():
        return False
    wanted = False
    for item in key:  # most often the first ends it
        if type(item) is Meta:
            if not _holds_losses(item):
                return False
            wanted = wanted or item.requires_grad
    return wanted


class JoiningLosses(Recipe):
    """A recipe whose result, if it is a loss, keeps the losses that it was made from."""

    __slots__ = ("made",)

    def __init__(self, made: Recipe) -> None:
        self.made = made

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = [one for one in flatten((args, kwargs)) if type(one) is ShardTensor]
        terms = _terms_of(operands)
        out = self.made.run(func, args, kwargs)
        if type(out) is ShardTensor and out._meta.requires_grad:
            out._terms = terms
        return out


def _terms_of(operands: Sequence[ShardTensor]) -> tuple[_Term, ...]:
    """The losses among them, and those that they were made of, the nearest where there are many."""
    terms = {}
    for loss in operands:
        meta = loss._meta
        if not (meta.requires_grad and meta.layout.is_partial and meta.shape.numel() == 1):
            continue  # its value is known
        known, version = getattr(loss, "_known", None), version_of(loss)
        if known is None or known[0] != version:
            loss._known = known = [version, None]
        transition = to_replicated(meta)
        if transition is not None and transition.reduction is not None:
            terms[id(known)] = _Term(loss._local.detach(), transition, known)
    for one in operands:
        terms.update((id(term.known), term) for term in one._terms)
    return tuple(terms.values())[:_MAX_TERMS]
