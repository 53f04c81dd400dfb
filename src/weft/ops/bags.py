"""`embedding_bag`: rows of a table, added up by bags.

A bag is what `embedding` and a sum are: with a cut vocabulary each rank adds up the rows that it
holds, and terms of bags are reduced, not rows of the table gathered. The largest of a bag are those
of its rows, which are no more than it names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.rules import op, page

__all__ = ["PAGE"]


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean",
    sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:
    """Rows of a table added up by bags, as terms where the table's rows are sharded. Gradients that
    count rows take gathered operands; none are sparse."""
    whole = scale_grad_by_freq or mode not in ("sum", "mean", "max") or (
        mode == "max" and (sparse or not input.numel())  # torch refuses sparse ones
    )
    two = input.dim() == 2
    weighs = per_sample_weights is not None
    if whole or two is not (offsets is None) or (weighs and (
        mode != "sum" or per_sample_weights.shape != input.shape  # type: ignore[union-attr]
    )):
        return NotImplemented
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight.detach(), input, max_norm, norm_type)
    if mode == "max":
        return _largest(input, weight, offsets, include_last_offset, padding_idx)
    rows = F.embedding(input, weight)
    counts: Any = None
    if padding_idx is not None:
        keep = input != padding_idx % weight.shape[0]
        rows = torch.where(keep.unsqueeze(-1), rows, 0)
        counts = keep.to(weight.dtype)
    elif mode == "mean":
        counts = torch.ones_like(input, dtype=weight.dtype)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if offsets is None:
        total = rows.sum(-2)
        count = None if mode == "sum" else counts.sum(-1)
    else:
        bag, num = _bags(input, offsets, include_last_offset)
        total = rows.new_zeros(num, weight.shape[1]).index_add(0, bag, rows)
        count = None if mode == "sum" else counts.new_zeros(num).index_add(0, bag, counts)
    return total if count is None else total / count.clamp(min=1).unsqueeze(-1)


def _largest(
    input: Tensor, weight: Tensor, offsets: Tensor | None, include_last: bool, padding: int | None
) -> Tensor:
    """The largest elements of each bag, as rows of as many places as the longest one has; of an
    empty one zeros."""
    keep: Any = None
    if offsets is not None:
        ends = torch.tensor(offsets.tolist(), device=input.device)
        ends = ends if include_last else torch.cat([ends, ends.new_tensor([input.shape[0]])])
        counts = ends.diff()
        line = torch.arange(int(counts.max()) if len(counts) else 0, device=ends.device)
        keep = line < counts.unsqueeze(1)
        input = input[(ends[:-1].unsqueeze(1) + line).clamp(max=input.shape[0] - 1)]
    if padding is not None:
        counts_not = input != padding % weight.shape[0]
        keep = counts_not if keep is None else counts_not & keep
    rows = F.embedding(input, weight)
    if keep is None:
        return rows.max(1)[0]
    largest = torch.where(keep.unsqueeze(-1), rows, -torch.inf).max(1)[0]
    return torch.where(keep.any(1).unsqueeze(-1), largest, 0)


def _bags(input: Tensor, offsets: Tensor, include_last: bool) -> tuple[Tensor, int]:
    """The bag of each index, and how many bags there are."""
    num = offsets.shape[0] - include_last
    places = torch.arange(input.shape[0], device=offsets.device)
    return torch.searchsorted(offsets[:num].contiguous(), places, right=True) - 1, num


PAGE = page(op("torch.nn.functional.embedding_bag", compose=_embedding_bag))
