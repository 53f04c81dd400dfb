"""scatter_reduce and index_reduce where the values are sharded, and the target has fewer elements.

Each rank reduces its own values to a table like the target, and the tables are joined. As in torch,
the values that attain an extremum share its gradient, and the target's own element with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.extrema import identity
from weft.ops.indexing.rows import matching
from weft.ops.precision import widened
from weft.rules import Call
from weft.transport import Shards

__all__ = ["extremum_at", "index_reduce", "joins", "scatter_reduce", "scatter_text"]

_JOINED = ("sum", "mean", "amax", "amin")
"""The reductions whose tables can be joined by one: products have no reduction with a gradient."""


def joins(call: Call) -> bool:
    """Whether tables are joined: gathering the values, or the indices, would take more bytes."""
    x, _, source = call.tensors[:3]
    return call.args[4] in _JOINED and x.dtype != "bool" and bool(x.shape) and (
        2 * math.prod(x.shape) <= math.prod(source.shape)
    )


def scatter_text(call: Call, wants_grad: Sequence[bool]) -> str | None:
    """Other dims pass where all operands have the same length; the kernel joins the shards of the
    named one, if each index has a value."""
    text = matching(0)(call, wants_grad)
    if text is None or not joins(call):
        return text
    dim = call.args[1] % len(call.tensors[0].shape)
    if call.tensors[1].shape[dim] != call.tensors[2].shape[dim]:
        return text
    return text.replace(f"i{dim}!", "i~").replace(f"s{dim}!", "i~")


def scatter_reduce(
    shards: Shards, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *,
    include_self: bool = True,
) -> Tensor:
    """Every shard reduces its values to a table like the target; the tables are joined."""
    rows = source[tuple(slice(length) for length in index.shape)]
    own = widened(x)
    rows = rows.to(own.dtype)
    if reduce in ("sum", "mean"):
        return _total(shards, own, dim, index, rows, reduce, include_self).to(x.dtype)
    kept = torch.ones_like(x, dtype=torch.bool) if include_self else _counts(
        shards, own, dim, index, torch.ones_like(index)) == 0
    return extremum_at(shards, own, dim, index, rows, reduce == "amax", kept).to(x.dtype)


def index_reduce(
    shards: Shards, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *,
    include_self: bool = True,
) -> Tensor:
    """Every shard reduces its rows to a table like the target; the tables are joined."""
    places = index.long().view(-1, *[1] * (x.dim() - 1 - dim % x.dim())).expand_as(source)
    return scatter_reduce(shards, x, dim, places, source, reduce, include_self=include_self)


def _counts(shards: Shards, x: Tensor, dim: int, index: Tensor, counted: Tensor) -> Tensor:
    """How many of the values at each position are counted, of all shards."""
    zeros = torch.zeros_like(x, dtype=torch.long)
    return shards.psum(zeros.scatter_add(dim, index, counted.long()))


def _total(
    shards: Shards, x: Tensor, dim: int, index: Tensor, rows: Tensor, reduce: str, include: bool
) -> Tensor:
    total = shards.psum(torch.zeros_like(x).scatter_add(dim, index, rows))
    if include and reduce == "sum":
        return x + total
    count = _counts(shards, x, dim, index, torch.ones_like(index))
    total = total + (x if include else torch.where(count > 0, 0, x))
    if reduce == "sum":
        return total
    count = (count + include).clamp(min=1)
    return total / count if x.is_floating_point() else total.div(count, rounding_mode="floor")


def extremum_at(
    shards: Shards, x: Tensor, dim: int, index: Tensor, rows: Tensor, largest: bool, kept: Tensor
) -> Tensor:
    """The extremum of all values at each position, and of x where that is `kept`."""
    start = torch.full_like(x, identity(x.dtype, largest))
    own = start.scatter_reduce(dim, index, rows.detach(), "amax" if largest else "amin")
    value = shards.pmax(own) if largest else shards.pmin(own)
    pair = torch.maximum if largest else torch.minimum
    value = torch.where(kept, pair(value, x.detach()), value)
    if not (torch.is_grad_enabled() and (x.requires_grad or rows.requires_grad)):
        return value
    mine, attains = x.detach() == value, rows.detach() == value.gather(dim, index)
    count = (_counts(shards, x, dim, index, attains) + mine).to(x.dtype)
    weight = attains / count.gather(dim, index)
    share = shards.psum(torch.zeros_like(x).scatter_add(dim, index, _weighted(rows, weight)))
    share = share + _weighted(torch.where(kept, x, x.detach()), mine / count)
    # The shares add up to the value but for rounding: make it exact, keep the gradient.
    return share + (value - share.detach()).nan_to_num(0.0, torch.inf, -torch.inf)


def _weighted(x: Tensor, weight: Tensor) -> Tensor:
    """The product, where what has no weight may be infinite."""
    return torch.where(weight == 0, 0, x * weight)
