"""Distinct elements of blocks, from which `unique` and `unique_consecutive` are made.

Each block contributes its own distinct elements, which are sorted among the blocks. Equal
neighbours form runs, and a block owns the runs that begin in it. Their number depends on data. Rows
have no keys and are sorted by regular samples: equal rows meet in one block (Shi and Schaeffer,
Parallel Sorting by Regular Sampling, 1992).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from weft.ops.sorting.sort import Sorting
from weft.ops.sorting.splitting import BlockGroup

__all__ = ["Distinct", "consecutive", "distinct", "distinct_rows"]


@dataclass(frozen=True, slots=True)
class Distinct:
    """For one block: the elements whose runs begin in it, and the number of runs of each block. If
    asked for, how often each occurs in all blocks, and per element of the block the number of its
    run."""

    values: Tensor
    sizes: tuple[int, ...]
    counts: Tensor | None
    inverse: Tensor | None


def distinct(group: BlockGroup, x: Tensor, numbers: bool, counts: bool) -> Distinct:
    """The distinct elements of all blocks, ascending.

    Args:
        x: this block, flat.
        numbers: whether the runs' numbers are asked for. counts: whether their lengths are.
    """
    found: Any = torch.unique(x, return_inverse=numbers, return_counts=counts)
    own, *more = found if numbers or counts else (found,)
    group = group.resized(group.tell(len(own)))
    done = Sorting(group, own.view(1, -1), False, [0, *accumulate(group.sizes)])
    weights = done.carry(more.pop().view(1, -1)) if counts else None
    runs = _runs(group, done.values, weights, numbers)
    inverse = None if runs.inverse is None else done.back(runs.inverse).flatten()[more[0]]
    return Distinct(runs.values, runs.sizes, runs.counts, inverse)


def distinct_rows(group: BlockGroup, x: Tensor, numbers: bool, counts: bool) -> Distinct:
    """The distinct rows of all blocks, in order, as `distinct`; `x` is (rows, width)."""
    own, inverse, nums = torch.unique(x, dim=0, return_inverse=True, return_counts=True)
    width = x.shape[1]
    ends = _ends_among(group, own, width)
    send = ends.bincount(minlength=group.num).tolist()
    recv = [sent[group.mine] for sent in group.tell(send)]
    flat = group.send(own.flatten(), [width * num for num in send], [width * num for num in recv])
    values, place = torch.unique(flat.view(-1, width), dim=0, return_inverse=True)
    totals = torch.zeros(len(values), dtype=torch.long, device=x.device)
    totals.index_add_(0, place, group.send(nums, send, recv))
    sizes = group.tell(len(values))
    back = group.send(place + sum(sizes[: group.mine]), recv, send)
    return Distinct(values, tuple(sizes), totals, back[inverse])


def _ends_among(group: BlockGroup, own: Tensor, width: int) -> Tensor:
    """The block that each of this rank's sorted rows goes to, by the samples it lies between."""
    shown = min(len(own), group.num)
    at = torch.arange(shown, device=own.device) * len(own) // max(shown, 1)
    counts = [num * width for num in group.tell(shown)]
    samples = torch.unique(group.gather_parts(own[at].flatten(), counts).view(-1, width), dim=0)
    places = torch.arange(1, group.num, device=own.device) * len(samples) // group.num
    borders = samples[places] if len(samples) else samples
    ranks = torch.unique(torch.cat([borders, own]), dim=0, return_inverse=True)[1]
    return torch.searchsorted(ranks[: len(borders)], ranks[len(borders) :], right=True)


def consecutive(group: BlockGroup, x: Tensor, numbers: bool, counts: bool) -> Distinct:
    """The first of equal neighbours, as `distinct`; `x` is this block, flat or as rows."""
    ones = torch.ones(len(x), dtype=torch.long, device=x.device) if counts else None
    return _runs(group, x, ones, numbers)


def _runs(group: BlockGroup, x: Tensor, weights: Tensor | None, numbers: bool) -> Distinct:
    """The runs of equal neighbours; how much they weigh, if weights are given."""
    lasts = group.gather(x[-1:] if len(x) else x.new_zeros(1, *x.shape[1:]))
    before = [at for at in range(group.mine) if group.sizes[at]]
    begins = torch.ones(len(x), dtype=torch.bool, device=x.device)
    if len(x):
        begins[1:] = _differ(x[1:], x[:-1])
        if before:
            begins[:1] = _differ(x[:1], lasts[before[-1]])
    values = x[begins]
    sizes = group.tell(len(values))
    if weights is None and not numbers:
        return Distinct(values, tuple(sizes), None, None)
    offset = sum(sizes[: group.mine])
    inverse = begins.cumsum(0) - 1 + offset
    if weights is None:
        return Distinct(values, tuple(sizes), None, inverse)
    # Number 0 is the run that an earlier block began.
    counts = torch.zeros(1 + sizes[group.mine], dtype=torch.long, device=x.device)
    counts.index_add_(0, inverse - offset + 1, weights)
    counts[-1] += _continued(group.tell(int(counts[0])), sizes, group.mine)
    return Distinct(values, tuple(sizes), counts[1:].clone(), inverse if numbers else None)


def _differ(one: Tensor, other: Tensor) -> Tensor:
    apart = one != other
    return apart if apart.dim() == 1 else apart.flatten(1).any(1)


def _continued(carried: Sequence[int], sizes: Sequence[int], mine: int) -> int:
    """How many elements of later blocks belong to the last run of this block."""
    total = 0
    for at in range(mine + 1, len(sizes)):
        total += carried[at]
        if sizes[at]:
            break
    return total
