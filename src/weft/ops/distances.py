"""Distances: those of all pairs of rows (pdist), and cdist where the rows are cut across."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Local, replicated
from weft.ops.blocks.summaries import Blocks
from weft.rules import Call, Decision

__all__ = ["cdist_lookup", "pdist_lookup"]


def pdist_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local | Decision:
    """`pdist(x, p)`: each shard has the pairs whose first row it holds, with all rows behind it"""
    x, norm, num = layouts[0], float(call.args[1]), layouts[0].shape[0]
    if not x.dims[0] or num < 2 or not math.isfinite(norm):
        return replicated(call, layouts)

    def before(row: int) -> int:
        """How many pairs begin with a row before this one."""
        return row * (2 * num - row - 1) // 2

    cuts = tuple(map(before, x.cuts_of(0)))
    result = Layout.make(x.mesh, (before(num),), x.dims[:1], (cuts,))

    def bind(mesh: BoundMesh) -> Callable[[Tensor], Tensor]:
        assert mesh.here is not None
        (start, stop), *_ = result.box_at(mesh.here)
        one, other = torch.triu_indices(num, num, 1, device=mesh.device)[:, start:stop]

        def local(rows: Tensor) -> Tensor:
            apart = rows.index_select(0, one) - rows.index_select(0, other)
            found = torch.linalg.vector_norm(apart, norm, -1)
            # A norm of order 0 has no gradient, torch's pdist one of zeros.
            return found if norm else found + rows.narrow(0, 0, 0).sum()

        return local

    return Local(Decision((Layout.replicated(x.mesh, x.shape),), (result,)), bind)


def cdist_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local | None:
    """`cdist(x, y, p)` of rows that are cut across: the norm of the blocks' distances, where these
    are less than the rows"""
    x, y, norm = layouts[0], layouts[1], float(call.args[2])
    if x.ndim != 2 or y.ndim != 2 or not norm or not math.isfinite(norm):
        return None
    wide = x if x.dims[1] else y
    axes = wide.dims[1]
    num, shape = wide.num_shards(1), call.results[0].shape
    if not axes or {*x.sharded_axes, *y.sharded_axes} != set(axes) or (
        num * math.prod(shape) > x.shape[1] * max(shape) or 0 in x.shape or 0 in y.shape
    ):
        return None
    x, y = (
        Layout.make(one.mesh, one.shape, ((), axes), (None, wide.cuts[1])) for one in (x, y)
    )

    def bind(mesh: BoundMesh) -> Callable[[Tensor, Tensor], Tensor]:
        blocks = Blocks(mesh, x, (1,))

        def local(one: Tensor, other: Tensor) -> Tensor:
            own = torch.cdist(one, other, norm)
            return torch.linalg.vector_norm(blocks.gather(own)[0], norm, 0)

        return local

    result = Layout.replicated(x.mesh, shape)
    return Local(Decision((x, y), (result,)), bind, communicates=axes)
