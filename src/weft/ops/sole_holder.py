"""What one rank of an axis has alone: a row of a sharded dim, as `x[i]` leaves it.

A sharded dim of length 1 is on one rank. Where `squeeze` drops it, its axes shard the last dim
instead, all of which is in one shard: nothing is sent. `unsqueeze` gives the axes back to the new
dim. So the product of rows with one of many sharded matrices is a batch of one product, whose rows
go to the rank of the matrix if that costs less than to spread the matrix. What other ops do with
such a tensor where they compare costs: see `propagate.factor_cuts.spread_sole_shard`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from weft.core import Layout
from weft.ops.algorithm import Composite
from weft.ops.nested_views import Placed, viewed
from weft.propagate import sole_shard
from weft.rules import Call, Decision, Rule, RuleText, rule
from weft.rules.factors import dim_list, one_dim

__all__ = ["LINEAR", "MATMUL", "STACK", "UNSQUEEZE", "at_the_matrix", "squeezed", "stacked",
           "unsqueezed"]

LINEAR = rule("... k, n k, [... n] -> ... n", "... k, k, [] -> ...", linear=[0, 1], bias=[2])
MATMUL = rule("... m k, ... k n -> ... m n", "... m k, k -> ... m", "k, ... k n -> ... n",
              "k, k ->", linear=[0, 1])
STACK = rule("{...} -> ... n", along="dim", linear=[0], moves=True)
UNSQUEEZE = rule("... -> ... 1", along="dim", linear=[0], moves=True)


def squeezed(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Decision | None:
    """The axes of a sharded dim that is dropped come to the last dim, over which products sum: they
    compare what it costs to spread it."""
    (layout,), shape = layouts, call.tensors[0].shape
    named = call.get("dim")
    gone = {dim for dim in ([] if named in ((), []) else dim_list(named, len(shape)))
            if shape[dim] == 1}
    sharded = [dim for dim in gone if layout.dims[dim]]
    left = [dim for dim in range(len(shape)) if dim not in gone]
    if len(sharded) != 1 or not left:
        return None
    (at,), to = sharded, left[-1]
    if not shape[to]:
        return None
    result = layout.take(left)
    dims, cuts = list(result.dims), list(result.cuts)
    inner, outer = layout.cuts_of(to), layout.cuts_of(at)
    holder, step = outer.index(1) - 1, len(inner) - 1
    dims[-1] = layout.dims[at] + layout.dims[to]
    cuts[-1] = (0,) * (holder * step) + inner + (shape[to],) * ((len(outer) - 2 - holder) * step)
    return viewed(call, layout, result.replace(dims=dims, cuts=cuts))


def unsqueezed(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Decision | Rule | None:
    """Where one rank of some axes has a row, they shard the new dim."""
    (layout,) = layouts
    found = _row(layout)
    if found is None:
        return _by_cuts(UNSQUEEZE, call, wants_grad) if any(layout.cuts) else None
    of, (outer, holder), (axes, cuts) = found
    at = one_dim(call.get("dim"), layout.ndim + 1)
    mine = Layout.make(layout.mesh, (1,), (outer,), (holder,))
    dims, own = list(layout.dims), list(layout.cuts)
    dims[of], own[of] = axes, cuts
    return viewed(call, layout, layout.replace(dims=dims, cuts=own).insert(at, mine))


def stacked(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Composite | Rule | None:
    """Rows that one rank each has come to shards of the new dim, as a `cat`."""
    if not all(any(layout.cuts) for layout in layouts):
        return None
    if None in map(_row, layouts):
        return _by_cuts(STACK, call, wants_grad)
    return Composite(_stack, each_call=True)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.cat([one.unsqueeze(dim) for one in tensors], dim)


def _row(layout: Layout) -> tuple[int, Placed, Placed] | None:
    """As `_sole`, of the last dim alone, where `squeezed` puts the axes of a row. Samples that a
    slice left on one rank have them at another dim, and keep them there."""
    return _sole(layout, range(layout.ndim)[-1:])


def _sole(layout: Layout, dims: Iterable[int]) -> tuple[int, Placed, Placed] | None:
    """The first of some dims of which one rank of its outer axes has all; these axes, as those of
    a dim of length 1; and what its other axes do."""
    sizes = layout.mesh.axis_sizes
    for dim in dims:
        axes, cuts = layout.dims[dim], layout.cuts[dim]
        if cuts is None:
            continue
        inner = [math.prod([sizes[axis] for axis in axes[num:]]) for num in range(len(axes) + 1)]
        for num in range(len(axes), 0, -1):
            holder = sole_shard(cuts[:: inner[num]])
            if holder is not None:
                outer = (0,) * (holder + 1) + (1,) * (inner[0] // inner[num] - holder)
                own = cuts[holder * inner[num] : (holder + 1) * inner[num] + 1]
                return dim, (axes[:num], outer), (axes[num:], own if axes[num:] else None)
    return None


def at_the_matrix(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Composite | Rule | None:
    """A product with a matrix that one rank of some axes has: a batch of one, whose rows go there
    if that costs less than to spread the matrix."""
    x, matrix = call.tensors[:2]
    if len(x.shape) != 2 or len(matrix.shape) != 2 or not any(layouts[1].cuts):
        return None
    linear = call.op.startswith("aten.linear")
    found = _sole(layouts[1], range(2))
    if found is None:
        return _by_cuts(LINEAR if linear else MATMUL, call, wants_grad)
    batch = _batch if found[0] else _turned
    return Composite(partial(_linear if linear else _product, batch), each_call=True)


def _by_cuts(text: RuleText, call: Call, wants_grad: Sequence[bool]) -> Rule | None:
    """The rule, which does not hold for other cuts."""
    found = text.bind(call, wants_grad)
    return None if found is None else replace(found, by_size=True)


def _linear(
    batch: Callable[[Tensor], Tensor], x: Tensor, matrix: Tensor, bias: Tensor | None = None
) -> Tensor:
    product = _rows(x, batch(matrix).mT)
    return product if bias is None else product + bias


def _product(batch: Callable[[Tensor], Tensor], x: Tensor, matrix: Tensor) -> Tensor:
    return _rows(x, batch(matrix))


def _rows(x: Tensor, matrices: Tensor) -> Tensor:
    """The product as a batch of one, of whose result the rows are kept together."""
    return torch.bmm(x.unsqueeze(0), matrices).mT.squeeze(0).t()


def _batch(matrix: Tensor) -> Tensor:
    return matrix.unsqueeze(0)


def _turned(matrix: Tensor) -> Tensor:
    """A batch of one, of a matrix whose first dim has the axes of a row: it was transposed."""
    return matrix.t().unsqueeze(0).mT
