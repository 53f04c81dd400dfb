"""Sorting along a sharded dim.

Each rank sorts its shard. `split` finds which of its elements belong to which shard of the result,
one exchange sends them there, and each rank merges what it received. A rank receives its own shard
of the result (values and positions) and the samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.sorting.splitting import Row, keys_of, split

__all__ = ["Sorting", "as_rows"]


def as_rows(x: Tensor, dim: int) -> tuple[Tensor, Sequence[int]]:
    """The tensor as (rows, length of the dim), and the lengths of its other dims."""
    moved = x.movedim(dim, -1)
    others = moved.shape[:-1]
    return moved.reshape(others.numel(), x.shape[dim]), others


class Sorting:
    """Rows of blocks on their way to sorted rows, which are cut at `cuts`.

    `values` and `places` are this rank's part of the sorted rows, flat: the elements, and their
    positions in the whole rows. `carry` moves data that belongs to the elements in the same way,
    `back` in the opposite direction.
    """

    __slots__ = (
        "places", "values", "_by_target", "_merged", "_order", "_recv", "_row", "_send",
    )

    def __init__(self, row: Row, rows: Tensor, descending: bool, cuts: Sequence[int]) -> None:
        keys, self._order = keys_of(rows, descending).sort(dim=-1, stable=True)
        num_rows, length = rows.shape
        inner = torch.tensor(cuts[1:-1], dtype=torch.long, device=rows.device)
        found = split(row, keys, inner.expand(num_rows, -1))
        del keys  # the largest of what is at hand
        sizes = torch.tensor(row.sizes, device=rows.device).view(-1, 1, 1).expand(-1, num_rows, 1)
        bounds = torch.cat([torch.zeros_like(sizes), found, sizes], -1)
        counts = bounds.diff(dim=-1)  # (blocks, rows, blocks of the result)
        mine = counts[:, :, row.mine]
        self._row = row
        self._send, self._recv = counts[row.mine].sum(0).tolist(), mine.sum(1).tolist()
        self._by_target = self._merged = None
        if num_rows > 1:
            at = torch.arange(length, device=rows.device).expand(num_rows, -1).contiguous()
            target = torch.searchsorted(bounds[row.mine, :, 1:-1].contiguous(), at, right=True)
            self._by_target = target.flatten().argsort(stable=True)
        values = self.carry(rows)
        merged = keys_of(values, descending).argsort(stable=True)
        if num_rows > 1:
            which = torch.arange(num_rows, device=rows.device).repeat(row.num)
            which = which.repeat_interleave(mine.flatten())
            merged = merged[which[merged].argsort(stable=True)]
        self._merged = merged
        self.values = values[merged]
        del values
        dtype = torch.int32 if cuts[-1] < 2**31 else torch.long
        own = torch.arange(cuts[row.mine], cuts[row.mine] + length, dtype=dtype, device=rows.device)
        self.places = self.carry(own.expand(num_rows, -1)).long()

    def carry(self, rows: Tensor) -> Tensor:
        """One value per element of the block, moved to the element's position in the result."""
        leaving = rows.gather(-1, self._order).flatten()
        if self._by_target is not None:
            leaving = leaving[self._by_target]
        got = self._row.exchange(leaving, self._send, self._recv)
        return got if self._merged is None else got[self._merged]

    def back(self, values: Tensor) -> Tensor:
        """One value per element of the result, moved to the element's position in the block."""
        assert self._merged is not None
        got = self._row.exchange(_undone(values, self._merged), self._recv, self._send)
        if self._by_target is not None:
            got = _undone(got, self._by_target)
        return torch.empty_like(self._order, dtype=values.dtype).scatter_(
            -1, self._order, got.view(self._order.shape)
        )


def _undone(values: Tensor, order: Tensor) -> Tensor:
    """The inverse of indexing by `order`."""
    return torch.empty_like(values).scatter_(0, order, values)
