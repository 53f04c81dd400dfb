"""Sorting along a sharded dim.

Each rank sorts its shard. `split` finds which of its elements belong to which shard of the result,
one exchange sends them there, and each rank merges what it received. A rank receives its own shard
of the result (values and positions) and the samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.sorting.splitting import BlockGroup, split

__all__ = ["Sorting", "as_rows", "narrowed"]


def as_rows(x: Tensor, dim: int) -> tuple[Tensor, Sequence[int]]:
    """The tensor as (rows, length of the dim), and the lengths of its other dims."""
    moved = x.movedim(dim, -1)
    others = moved.shape[:-1]
    return moved.reshape(others.numel(), x.shape[dim]), others


class Sorting:
    """Rows of blocks on their way to sorted rows, which are cut at `cuts`.

    `values` is this rank's part of the sorted rows, flat. `carry` moves data that belongs to the
    elements in the same way, `back` in the opposite direction. What is remembered are two orders,
    of as few bytes as they need.
    """

    __slots__ = ("values", "_cuts", "_leaving", "_merged", "_recv", "_group", "_send", "_shape")

    def __init__(
        self, group: BlockGroup, rows: Tensor, descending: bool, cuts: Sequence[int]
    ) -> None:
        self._group, self._shape, self._cuts = group, rows.shape, cuts
        num_rows, length = rows.shape
        inner = torch.tensor(cuts[1:-1], dtype=torch.long, device=rows.device)
        in_order, order = rows.detach().sort(dim=-1, descending=descending, stable=True)
        order = narrowed(order, length)
        found = split(group, in_order, inner.expand(num_rows, -1), descending)
        del in_order
        sizes = torch.tensor(group.sizes, device=rows.device).view(-1, 1, 1).expand(-1, num_rows, 1)
        bounds = torch.cat([torch.zeros_like(sizes), found, sizes], -1)
        counts = bounds.diff(dim=-1)  # (blocks, rows, blocks of the result)
        mine = counts[:, :, group.mine]
        self._send, self._recv = counts[group.mine].sum(0).tolist(), mine.sum(1).tolist()
        self._leaving, self._merged = _by_target(order, bounds[group.mine]), None
        del order
        got = self.carry(rows)
        self._merged = merged = _merging(got, mine, descending)
        self.values = got.index_select(0, merged)

    def places(self) -> Tensor:
        """The positions of `values` in the whole rows, of `int32` where that is enough."""
        first, last = self._cuts[self._group.mine : self._group.mine + 2]
        dtype = torch.int32 if self._cuts[-1] < 2**31 else torch.long
        return self.carry(torch.arange(
            first, last, dtype=dtype, device=self.values.device).expand(self._shape[0], -1))

    def carry(self, rows: Tensor) -> Tensor:
        """One value per element of the block, moved to the element's position in the result."""
        leaving = [rows.reshape(-1).index_select(0, self._leaving)]
        del rows
        got = self._group.send(leaving.pop(), self._send, self._recv)
        return got if self._merged is None else got.index_select(0, self._merged)

    def back(self, values: Tensor) -> Tensor:
        """One value per element of the result, moved to the element's position in the block."""
        assert self._merged is not None
        got = self._group.send(_undone(values, self._merged), self._recv, self._send)
        return _undone(got, self._leaving).view(self._shape)


def narrowed(order: Tensor, length: int) -> Tensor:
    """Positions below `length`, in as few bytes as they need."""
    return order.to(torch.int32) if length < 2**31 else order


def _by_target(order: Tensor, bounds: Tensor) -> Tensor:
    """Flat positions in a block, by the blocks of the result that the elements go to, and for each
    of these row by row. Row r sends its elements bounds[r, i]..bounds[r, i + 1], in `order`, to
    block i."""
    num_rows, length = order.shape
    if num_rows == 1:
        return order.reshape(-1)
    starts = length * torch.arange(num_rows, device=order.device).unsqueeze(1)
    order = narrowed(order.long() + starts, order.numel())
    at = torch.arange(length, device=order.device).expand(num_rows, -1).contiguous()
    target = torch.searchsorted(bounds[:, 1:-1].contiguous(), at, right=True, out_int32=True)
    del at
    return order.reshape(-1).index_select(0, target.view(-1).argsort(stable=True))


def _merging(got: Tensor, counts: Tensor, descending: bool) -> Tensor:
    """The order that merges what came from all blocks, `counts[block, row]` each, into rows."""
    merged = narrowed(got.detach().sort(dim=0, descending=descending, stable=True)[1], len(got))
    num_blocks, num_rows = counts.shape
    if num_rows == 1:
        return merged
    which = torch.arange(num_rows, dtype=torch.int32, device=got.device).repeat(num_blocks)
    which = which.repeat_interleave(counts.flatten()).index_select(0, merged)
    return merged.index_select(0, which.argsort(stable=True))


def _undone(values: Tensor, order: Tensor) -> Tensor:
    """The inverse of indexing by `order`."""
    return torch.empty_like(values).index_copy_(0, order.long(), values)
