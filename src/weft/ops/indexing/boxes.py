"""Boxes of a sharded tensor that depend on data: each rank knows only its own.

The ranks first exchange the beginnings and ends of their boxes in the sharded dims, and then
exactly the parts of the boxes that they own. Gradients of parts go back to the owners, who add them
up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Interval, Layout
from weft.ops.all_to_all import in_line
from weft.ops.sorting.splitting import BlockGroup
from weft.transport import Shards

__all__ = ["BoxExchange"]


class BoxExchange:
    """Fetches boxes of a tensor over the axes that shard `dims`.

    Args:
        mesh: bound to this rank.
        layout: of the tensor.
        dims: its sharded dims. The other dims of a box are those of the rank's own block.
    """

    __slots__ = ("_dims", "_mine", "_num", "_owned", "_group")

    def __init__(self, mesh: BoundMesh, layout: Layout, dims: Sequence[int]) -> None:
        shards = Shards(mesh, layout, dims)
        self._group, self._mine, self._dims = BlockGroup(shards), shards.index, tuple(dims)
        self._num = [layout.num_shards(dim) for dim in dims]
        self._owned = [
            tuple([layout.interval(dim, at) for dim, at in zip(dims, digits)])
            for digits in product(*map(range, self._num))
        ]

    def fetch(self, x: Tensor, box: Sequence[Interval]) -> Tensor:
        """The box of the tensor whose block on this rank is `x`; differentiable to any order.

        Args:
            box: per dim of `dims`, the places to fetch. All ranks call alike, with boxes of theirs.
        """
        told = self._group.gather(torch.tensor(box, device=x.device)).tolist()
        own = self._owned[self._mine]
        parts = [self._part(x, _common(own, each), own) for each in told]
        kept, parts[self._mine] = parts[self._mine], x.narrow(self._dims[0], 0, 0)
        shapes = [self._shape(x, _common(each, box)) for each in self._owned]
        sizes = [math.prod(shape) for shape in shapes]
        sizes[self._mine] = 0
        sent = in_line(parts)
        got = self._group.send(sent, [part.numel() for part in parts], sizes).split(sizes)
        return self._joined([
            kept if at == self._mine else part.view(shape)
            for at, (part, shape) in enumerate(zip(got, shapes))
        ])

    def _part(self, x: Tensor, part: Sequence[Interval], own: Sequence[Interval]) -> Tensor:
        for dim, (start, stop), (first, _) in zip(self._dims, part, own):
            x = x.narrow(dim, start - first if start < stop else 0, stop - start)
        return x

    def _shape(self, x: Tensor, part: Sequence[Interval]) -> list[int]:
        shape = list(x.shape)
        for dim, (start, stop) in zip(self._dims, part):
            shape[dim] = stop - start
        return shape

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """The box, of one part from each shard, in the order of the shards."""
        for dim, num in zip(reversed(self._dims), reversed(self._num)):
            lines = [parts[at : at + num] for at in range(0, len(parts), num)]
            parts = [torch.cat(line, dim) for line in lines]
        return parts[0]


def _common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The intersection of two boxes; of boxes apart in a dim, nothing of that dim."""
    found: list[Interval] = []
    for (start, stop), (first, last) in zip(one, other):
        begin = max(start, first)
        found.append((begin, max(begin, min(stop, last))))
    return found
