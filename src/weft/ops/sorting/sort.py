"""Sorting along a cut dim: sort, argsort, msort, topk.

Each rank sorts its block, `split` tells which of its elements belong to which block of the result,
one exchange brings them there, and each rank merges what it got. A rank receives its own block of
the result (values and places) and the samples. Where another dim can take the axes instead, the
rule does it: two exchanges, and whole rows are sorted by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Local
from weft.ops.blocks.summaries import Blocks, finish, whole_terms
from weft.ops.sorting.splitting import Row, can_key, keys_of, split
from weft.rules import Call, Decision

__all__ = [
    "Sorting", "as_rows", "can_move", "is_alone", "msort_lookup", "sort_lookup", "topk_lookup",
]


def sort_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """sort and argsort along a cut dim, where no other dim can take its axes. Always stable."""
    layout = layouts[0]
    if not layout.ndim:
        return None
    given, descending = _arguments(call)
    dim = given % layout.ndim
    if not is_alone(call, layout, dim):
        return None
    layout = whole_terms(layout)
    with_values = len(call.results) > 1

    def bind(bound: BoundMesh) -> Callable[[Tensor], Any]:
        row = Row(bound, layout, (dim,))

        def local(x: Tensor) -> Any:
            rows, others = as_rows(x, dim)
            done = Sorting(row, rows, descending, layout.cuts_of(dim))
            values, places = (
                one.view(*others, row.sizes[row.mine]).movedim(-1, dim)
                for one in (done.values, done.places)
            )
            return (values, places) if with_values else places

        return local

    return Local(
        Decision((layout,), (layout,) * len(call.results)), bind, communicates=layout.dims[dim]
    )


def _arguments(call: Call) -> tuple[int, bool]:
    if "dim" in call.kwargs:
        return call.kwargs["dim"], bool(call.kwargs["descending"])
    return call.args[1], bool(call.args[2])


def is_alone(call: Call, layout: Layout, dim: int) -> bool:
    """Whether the dim is cut and has elements, and no other dim is long enough for its axes."""
    if not layout.dims[dim] or 0 in layout.shape or not can_key(call.tensors[0].dtype):
        return False
    return not can_move(layout, dim)


def can_move(layout: Layout, dim: int) -> bool:
    """Whether another dim is long enough for the axes that cut this one."""
    ranks = layout.num_shards(dim)
    return any(
        layout.shape[other] // layout.num_shards(other) >= ranks
        for other in range(layout.ndim) if other != dim
    )


def as_rows(x: Tensor, dim: int) -> tuple[Tensor, Sequence[int]]:
    """The tensor as (rows, length of the dim), and the lengths of its other dims."""
    moved = x.movedim(dim, -1)
    others = moved.shape[:-1]
    return moved.reshape(others.numel(), x.shape[dim]), others


class Sorting:
    """Rows of blocks on their way to sorted rows, which are cut at `cuts`.

    `values` and `places` are this rank's part of the sorted rows, flat: the elements, and where
    they are in the whole rows. `carry` takes what belongs to the elements the same way, `back`
    the other way.
    """

    __slots__ = (
        "places", "values", "_by_target", "_merged", "_order", "_recv", "_row", "_send",
    )

    def __init__(self, row: Row, rows: Tensor, descending: bool, cuts: Sequence[int]) -> None:
        keys, self._order = keys_of(rows, descending).sort(dim=-1, stable=True)
        num_rows, length = rows.shape
        inner = torch.tensor(cuts[1:-1], dtype=torch.long, device=rows.device)
        found = split(row, keys, inner.expand(num_rows, -1))
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
        dtype = torch.int32 if cuts[-1] < 2**31 else torch.long
        own = torch.arange(cuts[row.mine], cuts[row.mine] + length, dtype=dtype, device=rows.device)
        self.places = self.carry(own.expand(num_rows, -1)).long()

    def carry(self, rows: Tensor) -> Tensor:
        """One value of each element of the block, at the element's place in the result."""
        leaving = rows.gather(-1, self._order).flatten()
        if self._by_target is not None:
            leaving = leaving[self._by_target]
        got = self._row.exchange(leaving, self._send, self._recv)
        return got if self._merged is None else got[self._merged]

    def back(self, values: Tensor) -> Tensor:
        """One value of each element of the result, at the element's place in the block."""
        assert self._merged is not None
        got = self._row.exchange(_undone(values, self._merged), self._recv, self._send)
        if self._by_target is not None:
            got = _undone(got, self._by_target)
        return torch.empty_like(self._order, dtype=values.dtype).scatter_(
            -1, self._order, got.view(self._order.shape)
        )


def _undone(values: Tensor, order: Tensor) -> Tensor:
    """What indexing by `order` made of it, before that."""
    return torch.empty_like(values).scatter_(0, order, values)


def msort_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """msort: sort along dim 0."""
    layout = layouts[0]
    return Composite(lambda x: x.sort(0)[0]) if layout.ndim and layout.dims[0] else None


def topk_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """topk along a cut dim: each block's own k are gathered, if that is less than sorting all."""
    layout = layouts[0]
    if not layout.ndim:
        return None
    _, k, given, largest, in_order = call.args
    dim = given % layout.ndim
    if not layout.dims[dim] or not k:
        return None
    itemsize, ranks = dtype_nbytes(call), layout.num_shards(dim)
    candidates = (ranks - 1) * k * (itemsize + 8)
    if candidates > layout.shape[dim] / ranks * (itemsize + 4):
        if not is_alone(call, layout, dim):
            return None

        def cut_off(x: Tensor, *args: Any) -> Any:
            values, places = x.sort(dim, descending=largest)
            return values.narrow(dim, 0, k).clone(), places.narrow(dim, 0, k).clone()

        return Composite(cut_off)

    def function(blocks: Blocks, x: Tensor) -> tuple[Tensor, Tensor]:
        each = [min(k, size) for size in blocks.sizes]
        values, places = x.topk(each[blocks.mine], dim, largest, in_order)
        places = places + blocks.layout.interval(dim, blocks.mine)[0]
        gathered = []
        for own in (values, places):
            (every,) = blocks.gather(_padded(own, dim, max(each)))
            gathered.append(torch.cat([
                block.narrow(dim, 0, count) for block, count in zip(every, each)
            ], dim))
        values, which = gathered[0].topk(k, dim, largest, in_order)
        return values, gathered[1].gather(dim, which)

    return finish(call, layout, (dim,), True, function)


def dtype_nbytes(call: Call) -> int:
    """Bytes of an element of the first operand."""
    return getattr(torch, call.tensors[0].dtype).itemsize


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """The tensor with zeros behind it."""
    missing = length - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros([
        missing if at == dim else size for at, size in enumerate(x.shape)
    ])], dim)
