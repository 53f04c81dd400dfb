"""What every rank knows of its own block of some dims, brought to all ranks: a few numbers each.

The one mechanism of scans, of reductions that no kind says, and of order statistics: each rank
reduces its block of the cut dims, the *summaries* of all blocks come to all ranks in one small
collective (the axes that cut the dims become a leading dim), and each rank finishes by itself.
The gather is S -> R, so the gradient of a summary is reduced and comes back to its block, and what
a rank makes of its block is ordinary torch code whose gradient is torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Local
from weft.rules import Call, Decision
from weft.transport import Transition

__all__ = [
    "HALF", "Blocks", "blocks_axes", "dtype_of", "finish", "is_cut", "left", "nothing_of",
    "reduced", "tied", "whole_terms", "wide",
]

HALF = (torch.float16, torch.bfloat16)


def dtype_of(call: Call, result: int = 0) -> torch.dtype:
    """The dtype of a result."""
    return getattr(torch, call.results[result].dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: terms in half precision would be rounded one by one."""
    return torch.float32 if dtype in HALF else dtype


def reduced(layout: Layout, dims: Any) -> tuple[int, ...]:
    """The dims that are reduced, non-negative; None or () means all, of a number any is none."""
    if dims is None or dims == [] or dims == () or not layout.ndim:
        return tuple(range(layout.ndim))
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(sorted({dim % layout.ndim for dim in dims}))


def is_cut(layout: Layout, dims: Sequence[int]) -> bool:
    """Whether some axis cuts one of the dims."""
    return any(layout.dims[dim] for dim in dims if dim < layout.ndim)


def whole_terms(layout: Layout) -> Layout:
    """The layout with every partial axis reduced."""
    if not layout.is_partial:
        return layout
    return layout.replace(cuts=layout.cuts, partial=(None,) * layout.mesh.ndim)


def left(
    shape: Sequence[int], layout: Layout, dims: Sequence[int], keepdim: bool,
    kind: str | None = None,
) -> Layout:
    """What is left of `shape` when `dims` are reduced: terms of `kind`, or the value everywhere."""
    partial = list(layout.partial)
    for dim in dims:
        for axis in layout.dims[dim]:
            partial[axis] = kind
    kept = [dim for dim in range(layout.ndim) if keepdim or dim not in dims]
    return Layout.make(
        layout.mesh, shape,
        [() if dim in dims else layout.dims[dim] for dim in kept],
        [None if dim in dims else layout.cuts[dim] for dim in kept],
        partial,
    )


class Blocks:
    """The blocks that mesh axes make of `dims`, seen from one rank.

    Blocks are in the order of the dims' axes, so along one dim in the order of its elements.
    `num` of them, `mine` is this rank's, `sizes` how many elements of the reduced dims each has
    (known from the cuts), `filled` those that have any.
    """

    __slots__ = ("axes", "bound", "dims", "filled", "layout", "mine", "num", "sizes", "_moves")

    def __init__(self, bound: BoundMesh, layout: Layout, dims: Sequence[int]) -> None:
        assert bound.here is not None
        self.bound, self.layout, self.dims = bound, layout, tuple(dims)
        self.axes = tuple(axis for dim in dims for axis in layout.dims[dim])
        lengths = [layout.sizes_of(dim) for dim in dims]
        self.sizes = tuple(math.prod(each) for each in product(*lengths))
        self.num = len(self.sizes)
        self.filled = tuple(at for at, size in enumerate(self.sizes) if size)
        self.mine = 0
        for dim in dims:
            index = layout.shard_index(dim, bound.here)
            self.mine = self.mine * layout.num_shards(dim) + index
        self._moves: dict[tuple[int, ...], Transition] = {}

    def gather(self, *own: Tensor) -> list[Tensor]:
        """The summaries of all blocks, each with a leading dim of `num`, on every rank.

        A summary has the dims of the tensor, with length 1 (or one of its own) where it is
        reduced. Those of one dtype travel together.
        """
        if len(own) > 1 and len({one.dtype for one in own}) == 1:
            one = self._gather(torch.stack(own, -1))
            return list(one.unbind(-1))
        return [self._gather(one) for one in own]

    def _gather(self, own: Tensor) -> Tensor:
        more = tuple(own.shape[self.layout.ndim :])
        kept = tuple(own.shape[dim] for dim in self.dims)
        move = self._moves.get((*kept, *more))
        if move is None:
            move = self._moves[(*kept, *more)] = self._move(kept, more)
        return move(own.unsqueeze(0).contiguous())

    def _move(self, kept: Sequence[int], more: Sequence[int]) -> Transition:
        layout = self.layout
        lengths = dict(zip(self.dims, kept))
        shape = [lengths.get(dim, length) for dim, length in enumerate(layout.shape)]
        dims = [() if dim in lengths else layout.dims[dim] for dim in range(layout.ndim)]
        cuts = [None if dim in lengths else layout.cuts[dim] for dim in range(layout.ndim)]
        none = [None] * (1 + len(more))
        src, dst = (
            Layout.make(
                layout.mesh, (self.num, *shape, *more), (lead, *dims, *((),) * len(more)),
                (None, *cuts, *none[1:]), layout.partial,
            )
            for lead in (self.axes, ())
        )
        return Transition(self.bound, src, dst, dst_varying=frozenset(self.axes))

    def of_filled(self, gathered: Tensor) -> Tensor:
        """The summaries of the blocks that have elements."""
        if len(self.filled) == self.num:
            return gathered
        return torch.stack([gathered[at] for at in self.filled])


def nothing_of(x: Tensor, dims: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The summary of a block without elements: zero, with a graph edge to the block, so that
    every rank takes part in the backward of what is gathered."""
    return x.sum(tuple(dims), keepdim=True).to(dtype)


def tied(out: Tensor, *others: Tensor) -> Tensor:
    """The result with a graph edge to what this rank, unlike others, had no use for."""
    for other in others:
        if other.requires_grad and torch.is_grad_enabled():
            out = out + other.reshape(-1).narrow(0, 0, 0).sum().to(out.dtype)
    return out


def finish(
    call: Call, layout: Layout, dims: tuple[int, ...], keepdim: bool,
    function: Callable[[Blocks, Tensor], Any],
) -> Local:
    """A reduction of `dims` by summaries: `function(blocks, local)` gives the results with the
    reduced dims kept; they are replicated over the axes that cut the dims."""
    layout = whole_terms(layout)
    results = tuple(left(result.shape, layout, dims, keepdim) for result in call.results)

    def bind(bound: BoundMesh) -> Callable[[Tensor], Any]:
        blocks = Blocks(bound, layout, dims)

        def local(x: Tensor) -> Any:
            out = function(blocks, x)
            if keepdim:
                return out
            if isinstance(out, tuple):
                return tuple([one.squeeze(dims) for one in out])
            return out.squeeze(dims)

        return local

    return Local(Decision((layout,), results), bind, communicates=blocks_axes(layout, dims))


def blocks_axes(layout: Layout, dims: Sequence[int]) -> tuple[int, ...]:
    """The axes over which summaries are gathered."""
    return tuple(axis for dim in dims for axis in layout.dims[dim])
