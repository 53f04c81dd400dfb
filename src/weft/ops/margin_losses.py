"""Losses that compare distances with a margin: of elements, pairs and triples, and of classes.

Each is torch code that defines the loss, with its reduction at the end, so a mean is over all
elements, on whatever rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.rules import op, page

__all__ = ["PAGE"]

_NONE, _MEAN = 0, 1  # torch's numbers for reduction=


def _reduced(each: Tensor, reduction: int) -> Tensor:
    if reduction == _NONE:
        return each
    return each.mean() if reduction == _MEAN else each.sum()


def _hinge_embedding(
    x: Tensor, target: Tensor, margin: float = 1.0, reduction: int = _MEAN
) -> Tensor:
    """A loss of elements, reduced: any dim may be sharded; a mean counts all elements."""
    apart = torch.where(target != 1, (margin - x).clamp_min(0), 0)
    return _reduced(apart + torch.where(target != -1, x, 0), reduction)


def _margin_ranking(
    x: Tensor, y: Tensor, target: Tensor, margin: float = 0.0, reduction: int = _MEAN
) -> Tensor:
    """A loss of pairs of elements, reduced: any dim may be sharded; a mean counts all pairs."""
    return _reduced((-target * (x - y) + margin).clamp_min(0), reduction)


def _cosine_embedding(
    x: Tensor, y: Tensor, target: Tensor, margin: float = 0.0, reduction: int = _MEAN
) -> Tensor:
    """A loss of pairs of rows, by sums along them: any dim may be sharded; sharded rows reduce
    three sums each."""
    dim, eps = target.dim(), 1e-12  # both are torch's
    sizes = [(one * one).sum(dim) + eps for one in (x, y)]
    cosine = (x * y).sum(dim) / (sizes[0] * sizes[1]).sqrt()
    alike = torch.where(target == 1, 1 - cosine, 0)
    return _reduced(alike + torch.where(target == -1, (cosine - margin).clamp_min(0), 0), reduction)


def _triplet_margin(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2.0,
    eps: float = 1e-6, swap: bool = False, reduction: int = _MEAN,
) -> Tensor:
    """A loss of triples of rows, by their distances: any dim may be sharded; sharded rows reduce
    one number per distance."""
    near = F.pairwise_distance(anchor, positive, p, eps)
    far = F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return _reduced((margin + near - far).clamp_min(0), reduction)


def _multi_margin(
    x: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """How far each class except the target comes within the margin; a mean over classes."""
    rows = x if x.dim() > 1 else x.reshape(1, -1)
    target = target.reshape(-1, 1)
    within = (margin - rows.gather(1, target) + rows).relu()
    within = (within if p == 1 else within * within).scatter(1, target, 0)
    if weight is not None:
        within = within * weight[target]
    each = within.sum(1) / rows.shape[1]
    return _reduced(each if x.dim() > 1 or reduction != _NONE else each.squeeze(0), reduction)


PAGE = page(
    op("hinge_embedding_loss", compose=_hinge_embedding),
    op("margin_ranking_loss", compose=_margin_ranking),
    op("cosine_embedding_loss", compose=_cosine_embedding),
    op("triplet_margin_loss", compose=_triplet_margin),
    op("multi_margin_loss", compose=_multi_margin, floats_flow=False, has_meta_gradient=False),
)
