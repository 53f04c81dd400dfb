"""`embedding_bag`: rows of a table, added up by bags.

A bag is summed where its rows are read, by torch's kernel, and no row is kept. If the table is
sharded, each rank sums the rows that it holds, which gives partial values. Bags may be sharded,
too: then each rank has its own. If indices are sharded without offsets, the sum is partial. For the
largest elements, each shard finds its own, and contributes those that are the largest of all as
partial values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.ops.reads import own_rows
from weft.rules import OwnRule, op, page
from weft.tensor.call.own.functions import OwnFunction
from weft.tensor.shard_tensor import ShardTensor
from weft.transport import Shards

__all__ = ["PAGE"]


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean",
    sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:
    """Rows of a table, summed by bags; partial values if the table's rows are sharded. Gradients
    that count rows take gathered operands; none are sparse."""
    if input.dtype not in (torch.int32, torch.int64):  # a table's shard may be empty
        raise RuntimeError(
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: "
            f"Long, Int; but got {torch.empty(0, dtype=input.dtype).type()} instead (while "
            "checking arguments for embedding_bag)")
    whole = scale_grad_by_freq or mode not in ("sum", "mean", "max") or (
        mode == "max" and (sparse or not input.numel())  # torch refuses sparse ones
    )
    two = input.dim() == 2
    weighs = per_sample_weights is not None
    if whole or two is not (offsets is None) or (weighs and (
        mode != "sum" or per_sample_weights.shape != input.shape  # type: ignore[union-attr]
    )):
        return NotImplemented
    bounds = None if offsets is None else _bounds(offsets, input.shape[0], include_last_offset)
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight.detach(), input, max_norm, norm_type)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    if mode == "max":
        return ShardTensor.__torch_function__(_MAXIMA, (), (weight, input, bounds, padding), {})
    given = weight, input, bounds, per_sample_weights, padding
    total = ShardTensor.__torch_function__(_SUMS, (), given, {})
    if mode == "sum":
        return total
    if two and padding_idx is None:
        return total / max(input.shape[1], 1)
    counts = _counts(input, bounds, padding if padding_idx is not None else None)
    return total / counts.to(total.dtype).clamp(min=1).unsqueeze(-1)


def _bounds(offsets: Tensor, length: int, include_last: bool) -> tuple[Tensor, Tensor]:
    """Where each bag begins and ends among the indices; torch's errors of offsets, on all ranks."""
    num = offsets.shape[0]
    ends = offsets[1:] if include_last else torch.cat([offsets[1:], offsets.new_tensor([length])])
    if not num:
        return offsets, offsets
    first, last = offsets[0].item(), offsets[-1].item()
    if first != 0:
        raise RuntimeError(
            "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from "
            f"position 0. However, got {first}")
    if last > length:
        raise RuntimeError(
            f"offsets[-1] can not be greater than input's length {length} but got offsets[-1] of "
            f"{last}")
    if last < 0:  # torch's kernels then read before the indices, and find none of the table's
        raise IndexError("index out of range in self")
    return offsets[: num - include_last], ends


def _counts(input: Tensor, bounds: tuple[Tensor, Tensor] | None, padding: int | None) -> Tensor:
    """How many rows each bag counts."""
    if bounds is not None and padding is None:
        return bounds[1] - bounds[0]
    keep = input != padding
    if bounds is None:
        return keep.sum(1)
    before = torch.cat([keep.new_zeros(1, dtype=torch.long), keep.cumsum(0)])
    return before[bounds[1]] - before[bounds[0]]


# On one rank.


def _of_shards(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel of a function that may be of shards."""
    return lambda shards, *args: function(*args, shards=shards)


def _held(weight: Tensor, shards: Shards | None) -> tuple[int, int]:
    """The first row of a table that this rank has, and the length of the table."""
    return (0, len(weight)) if shards is None else (shards.starts[0], shards.layout.shape[0])


def _sums(
    weight: Tensor, input: Tensor, bounds: tuple[Tensor, Tensor] | None, weighs: Tensor | None,
    padding: int, shards: Shards | None = None,
) -> Tensor:
    """The sum of each bag; of shards, of the rows that this rank holds."""
    start, length = _held(weight, shards)
    rows, by, offsets = _flat(input, bounds, weighs)
    own, keep = own_rows(rows, start, start + len(weight), length)
    keep = keep & (rows != padding)
    before = torch.cat([keep.new_zeros(1, dtype=torch.long), keep.cumsum(0)])
    begins = before[offsets]
    own, by = own[keep], None if by is None else by[keep]
    if len(own):
        return torch.embedding_bag(weight, own, begins, False, 0, False, by)[0]
    total = weight[:0].sum(0).expand(len(begins), -1)
    return total if by is None else total + by.sum()


def _flat(
    input: Tensor, bounds: tuple[Tensor, Tensor] | None, weighs: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The indices of this rank's bags, one bag after the other, and their weights; where each bag
    begins among them."""
    if bounds is None:
        num, each = input.shape
        line = torch.arange(num, device=input.device) * each
        by = None if weighs is None else weighs.reshape(-1)
        return input.reshape(-1), by, line
    begins, ends = (one.to(torch.long) for one in bounds)
    first, last = (int(begins[0]), int(ends[-1])) if len(begins) else (0, 0)
    by = None if weighs is None else weighs[first:last]
    return input[first:last], by, begins - first


def _string(
    weight: Any, input: Any, bounds: Any, weighs: Any, padding: int
) -> str:
    """Bags of one length, or between bounds: "v~:sum e, n!, b, b -> b e"."""
    rows = "b l" if bounds is None else "n!"
    given = [rows, *(() if bounds is None else ("b", "b")), *(() if weighs is None else (rows,))]
    return f"v~:sum e, {', '.join(given)} -> b e"


_SUMS = OwnFunction(
    "embedding_bag", _sums, _sums, OwnRule("embedding_bag", _string, kernel=_of_shards(_sums)))


# The largest elements of bags.


def _maxima(
    weight: Tensor, input: Tensor, bounds: tuple[Tensor, Tensor] | None, padding: int,
    shards: Shards | None = None,
) -> Tensor:
    """The largest elements of each bag, of an empty one zeros; of shards as partial values, of
    equal ones the first in its bag."""
    rows, _, begins = _flat(input, bounds, None)
    best, row, place = _largest(weight, rows, begins, padding, *_held(weight, shards))
    if shards is not None:
        place.masked_fill_(best != shards.pmax(best), len(rows))
    del best
    has = place < len(rows)
    if shards is not None:
        has &= place == shards.pmin(place)
    del place
    return _elements(weight, row, has)


def _largest(
    weight: Tensor, rows: Tensor, begins: Tensor, padding: int, start: int, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Per bag and column of a table of this length, of which there are the rows from `start` on:
    the largest element, its row here, and its place among all indices (their number: none). Torch
    takes a number that is none if it is a bag's first."""
    counts = torch.cat([begins, begins.new_tensor([len(rows)])]).diff()
    weight = weight.detach()
    best = weight.new_full((len(begins), weight.shape[1]), -torch.inf)
    row = torch.zeros_like(best, dtype=torch.int32)  # half as long as what names them
    place = torch.full_like(row, len(rows))
    begun = torch.zeros_like(counts, dtype=torch.bool)
    for step in range(int(counts.max()) if len(counts) else 0):
        at = (begins + step).clamp(max=len(rows) - 1)
        counted = (step < counts) & (rows[at] != padding)
        own, keep = own_rows(rows[at], start, start + len(weight), length)
        if len(weight):
            seen = weight[own.where(keep, 0)]
            first = (counted & ~begun).unsqueeze(1)
            better = (seen > best) | (seen.isnan() & first) | (
                ~seen.isnan() & (place == len(rows)))
            better &= (counted & keep).unsqueeze(1)
            torch.where(better, seen.nan_to_num_(torch.inf, torch.inf, -torch.inf), best, out=best)
            torch.where(better, own.unsqueeze(1).int(), row, out=row)
            torch.where(better, at.unsqueeze(1).int(), place, out=place)
        begun |= counted
    return best, row, place


def _elements(weight: Tensor, row: Tensor, has: Tensor) -> Tensor:
    if not len(weight):
        return weight.sum(0).expand(len(row), -1)
    columns = torch.arange(weight.shape[1], device=row.device)
    return torch.where(has, weight[row, columns], 0)


def _string_of_maxima(weight: Any, input: Any, bounds: Any, padding: int) -> str:
    """A rank has all indices of its bags."""
    return f"v~:sum e, {'b l!' if bounds is None else 'n!, b, b'} -> b e"


_MAXIMA = OwnFunction(
    "embedding_bag", _maxima, _maxima,
    OwnRule("embedding_bag", _string_of_maxima, kernel=_of_shards(_maxima)))


PAGE = page(op("torch.nn.functional.embedding_bag", compose=_embedding_bag, each_call=True))
