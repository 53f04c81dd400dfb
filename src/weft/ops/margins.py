"""Losses that compare distances with a margin: of elements, pairs and triples, and of classes.

Each is the torch code that says what it means, reduced at the end, so that a mean is one of all
elements, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core import Layout
from weft.ops.algorithm import Composite, where_cut
from weft.rules import Call

__all__ = ["TABLE"]

_NONE, _MEAN = 0, 1  # torch's numbers for reduction=


def _reduced(each: Tensor, reduction: int) -> Tensor:
    if reduction == _NONE:
        return each
    return each.mean() if reduction == _MEAN else each.sum()


def _hinge_embedding(
    x: Tensor, target: Tensor, margin: float = 1.0, reduction: int = _MEAN
) -> Tensor:
    """A loss of elements, reduced: any dim may be cut; a mean counts all elements."""
    apart = torch.where(target != 1, (margin - x).clamp_min(0), 0)
    return _reduced(apart + torch.where(target != -1, x, 0), reduction)


def _margin_ranking(
    x: Tensor, y: Tensor, target: Tensor, margin: float = 0.0, reduction: int = _MEAN
) -> Tensor:
    """A loss of pairs of elements, reduced: any dim may be cut; a mean counts all pairs."""
    return _reduced((-target * (x - y) + margin).clamp_min(0), reduction)


def _cosine_embedding(
    x: Tensor, y: Tensor, target: Tensor, margin: float = 0.0, reduction: int = _MEAN
) -> Tensor:
    """A loss of pairs of rows, by sums along them: any dim may be cut; cut rows reduce three sums
    each."""
    dim, eps = target.dim(), 1e-12  # both are torch's
    sizes = [(one * one).sum(dim) + eps for one in (x, y)]
    cosine = (x * y).sum(dim) / (sizes[0] * sizes[1]).sqrt()
    alike = torch.where(target == 1, 1 - cosine, 0)
    return _reduced(alike + torch.where(target == -1, (cosine - margin).clamp_min(0), 0), reduction)


def _triplet_margin(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2.0,
    eps: float = 1e-6, swap: bool = False, reduction: int = _MEAN,
) -> Tensor:
    """A loss of triples of rows, by their distances: any dim may be cut; cut rows reduce a number
    for each distance."""
    near = F.pairwise_distance(anchor, positive, p, eps)
    far = F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return _reduced((margin + near - far).clamp_min(0), reduction)


def _multi_margin(
    x: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """Of each class but the target's, how far it comes within the margin; a mean over classes."""
    rows = x if x.dim() > 1 else x.reshape(1, -1)
    target = target.reshape(-1, 1)
    within = (margin - rows.gather(1, target) + rows).relu()
    within = (within if p == 1 else within * within).scatter(1, target, 0)
    if weight is not None:
        within = within * weight[target]
    each = within.sum(1) / rows.shape[1]
    return _reduced(each if x.dim() > 1 or reduction != _NONE else each.squeeze(0), reduction)


def _multi_margin_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Composite:
    """A loss of classes, by the gathered score of the target: rows or classes may be cut."""
    # Always: torch's own has no gradient on meta tensors, which ranks outside a mesh have.
    return Composite(_multi_margin)


def _multilabel_margin(x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    """A loss of rows by torch's own kernel, then the sum or mean: rows may be cut, classes are
    made whole."""
    if not x.dim():
        x, target = x.reshape(1), target.reshape(1)
    return _reduced(torch.ops.aten.multilabel_margin_loss(x, target, _NONE), reduction)


TABLE = {
    "aten.hinge_embedding_loss.default": where_cut(_hinge_embedding),
    "aten.margin_ranking_loss.default": where_cut(_margin_ranking),
    "aten.cosine_embedding_loss.default": where_cut(_cosine_embedding),
    "aten.triplet_margin_loss.default": where_cut(_triplet_margin),
    "aten.multi_margin_loss.default": _multi_margin_lookup,
    "aten.multilabel_margin_loss.default": where_cut(
        _multilabel_margin, lambda call: call.args[2] != _NONE
    ),
}
"""Op name -> who answers for it."""
