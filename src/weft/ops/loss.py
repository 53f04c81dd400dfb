"""Losses over cut dims. Means divide by true global counts (ignored targets, weights included).

A mean is a sum that stays partial, over a count that is reduced first: ranks with uneven batches
or with different numbers of ignored targets get the right loss and the right gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, replicated
from weft.rules import Call, Decision

__all__ = ["REDUCED_AT", "cross_entropy_lookup", "elementwise_lookup", "nll_loss_lookup"]

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers for reduction=

REDUCED_AT = {
    "aten.mse_loss.default": 2,
    "aten.l1_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.huber_loss.default": 2,
    "aten.soft_margin_loss.default": 2,
    "aten.kl_div.default": 2,
    "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
    "aten.poisson_nll_loss.default": 5,
}
"""Losses that are elementwise before their reduction, and where that argument stands."""


def _any_sharded(layouts: Sequence[Layout]) -> bool:
    return any(not layout.is_replicated for layout in layouts)


def elementwise_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """A loss of elements, reduced: the elements by their rule, then the sum or mean."""
    place = REDUCED_AT[call.op]
    reduction = call.args[place]
    if reduction == _NONE or not _any_sharded(layouts):
        return None
    namespace, base, overload = call.op.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), base), overload)

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        each = op(*args[:place], _NONE, *args[place + 1 :], **kwargs)
        return each.mean() if reduction == _MEAN else each.sum()

    return Composite(loss)


def cross_entropy_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | Decision | None:
    """cross_entropy_loss with anything sharded."""
    if not _any_sharded(layouts):
        return replicated(call, layouts)
    logits, target = layouts[0], call.tensors[1]
    classes = 1 if logits.ndim > 1 else 0
    hard = not target.dtype.startswith(("float", "bfloat"))
    if logits.ndim > 1 and hard and not logits.dims[classes]:
        # Each sample by itself: the rule does it; its mean goes by the true count.
        return None if call.args[3] == _NONE else Composite(_reduced_cross_entropy)
    return Composite(_cross_entropy)


def nll_loss_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | Decision | None:
    """nll_loss with anything sharded."""
    return Composite(_nll) if _any_sharded(layouts) else replicated(call, layouts)


def _reduced_cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: Any = None, reduction: int = _MEAN,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> torch.Tensor:
    total = torch.nn.functional.cross_entropy(
        x, target, weight, ignore_index=ignore_index, reduction="none",
        label_smoothing=label_smoothing,
    ).sum()
    if reduction == _SUM:
        return total
    valid = target != ignore_index
    return total / _class_weights(target, valid, weight, x.dtype).sum()


def _cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: Any = None, reduction: int = _MEAN,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> torch.Tensor:
    classes = 1 if x.dim() > 1 else 0
    logp = torch.log_softmax(x, classes)
    if target.is_floating_point():
        return _against_probabilities(logp, target, weight, reduction, label_smoothing, classes)
    hard = _nll(logp, target, weight, reduction, ignore_index)
    if label_smoothing == 0.0:
        return hard
    count = x.shape[classes]
    spread = -_weighted(logp, weight, classes).sum(classes)
    valid = target != ignore_index
    spread = torch.where(valid, spread, 0.0)
    if reduction == _MEAN:
        spread = spread.sum() / _class_weights(target, valid, weight, logp.dtype).sum()
    elif reduction == _SUM:
        spread = spread.sum()
    return (1 - label_smoothing) * hard + label_smoothing / count * spread


def _against_probabilities(
    logp: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, smoothing: float,
    classes: int,
) -> torch.Tensor:
    if smoothing > 0.0:
        target = target * (1 - smoothing) + smoothing / logp.shape[classes]
    each = -(_weighted(logp, weight, classes) * target).sum(classes)
    if reduction == _NONE:
        return each
    total = each.sum()
    return total / max(each.numel(), 1) if reduction == _MEAN else total


def _weighted(logp: torch.Tensor, weight: Any, classes: int) -> torch.Tensor:
    if weight is None:
        return logp
    return logp * weight.reshape([-1] + [1] * (logp.dim() - 1 - classes))


def _class_weights(
    target: torch.Tensor, valid: torch.Tensor, weight: Any, dtype: torch.dtype
) -> torch.Tensor:
    """The weight of each target, zero where it is ignored."""
    if weight is None:
        return valid.to(dtype)
    known = torch.where(valid, target, 0)
    each = torch.embedding(weight.unsqueeze(-1), known).squeeze(-1)
    return torch.where(valid, each, 0.0)


def _nll(
    logp: torch.Tensor, target: torch.Tensor, weight: Any = None, reduction: int = _MEAN,
    ignore_index: int = -100,
) -> torch.Tensor:
    classes = 1 if logp.dim() > 1 else 0
    valid = target != ignore_index
    known = torch.where(valid, target, 0)
    picked = torch.gather(logp, classes, known.unsqueeze(classes)).squeeze(classes)
    weights = _class_weights(target, valid, weight, logp.dtype)
    each = torch.where(valid, -(picked * weights), 0.0)
    if reduction == _NONE:
        return each
    total = each.sum()
    return total / weights.sum() if reduction == _MEAN else total
