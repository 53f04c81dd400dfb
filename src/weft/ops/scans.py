"""Scans: cumsum, cumprod, cummax, cummin, logcumsumexp.

Along a sharded dim each rank scans its shard. The total of every shard is gathered, and each rank
combines the totals of the shards before its own with its own scan (Blelloch, Prefix Sums and Their
Applications, 1990). A rank receives one slice per shard, whatever the length of the dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.ops.elementwise import result_like
from weft.ops.idle import empty_summary, unless_idle
from weft.ops.precision import wide, widened
from weft.ops.reductions import exp_sums, is_complex, log_of_sums
from weft.rules import op, page, rule
from weft.transport import Shards

__all__ = ["PAGE"]


def _cumsum_result(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor | None:
    if dtype is not None or not x.is_floating_point() or not -x.ndim <= dim < x.ndim:
        return None
    return result_like(x, x.dtype) if x.is_contiguous() else None


def _last(x: Tensor, scan: Tensor, dim: int) -> Tensor:
    """The last slice of a shard's scan."""
    if not x.shape[dim]:
        return empty_summary(x, (dim,), scan.dtype)
    return scan.narrow(dim, x.shape[dim] - 1, 1)


def _cumsum(shards: Shards, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Each shard's own sums, plus the totals of the shards before it."""
    dtype = dtype or _summed(x.dtype)
    own = x.cumsum(dim, dtype=wide(dtype))
    (totals,) = shards.gather(_last(x, own, dim))
    if shards.index == 0:
        return shards.tie(own.to(dtype), totals)
    return (own + totals[: shards.index].sum(0, dtype=own.dtype)).to(dtype)


def _summed(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch adds: integers as int64."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def _cumprod(shards: Shards, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Each shard's own products, times those of the shards before it."""
    dtype = dtype or _summed(x.dtype)
    own = x.cumprod(dim, dtype=wide(dtype))
    total = _last(x, own, dim) if x.shape[dim] else empty_summary(x, (dim,), own.dtype) + 1
    (totals,) = shards.gather(total)
    return (own * totals[: shards.index].prod(0)).to(dtype)


def _logcumsumexp(shards: Shards, x: Tensor, dim: int) -> Tensor:
    """Each shard's maximum and sum of exponentials; those of earlier shards come first."""
    dtype, x = x.dtype, widened(x)
    largest, sums = shards.gather(*exp_sums(x, (dim,)))
    before = [at for at in shards.filled if at < shards.index]
    if not before:  # the gradient of the sums depends on them, as on the other ranks
        return shards.tie(x.logcumsumexp(dim).to(dtype), sums[:0].exp())
    carry = log_of_sums(largest[before], sums[before])
    out = torch.cat([carry, x], dim).logcumsumexp(dim)
    return out.narrow(dim, 1, x.shape[dim]).to(dtype, copy=True)


def _of_shard(largest: bool) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    """cummax or cummin of a shard. For an empty shard torch's gradient is the operand itself, so
    its graph would differ from that of the other ranks."""
    function = torch.cummax if largest else torch.cummin

    def scan(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        if x.numel():
            return function(x, dim)
        return x.clone(), torch.empty_like(x, dtype=torch.int64, requires_grad=False)

    return scan


def _extreme(largest: bool) -> Callable[..., Any]:
    """cummax and cummin: the later of equal elements counts, and the latest NaN."""
    function = _of_shard(largest)
    beats = torch.ge if largest else torch.le

    def kernel(shards: Shards, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        values, places = function(x, dim)
        places = places + shards.starts[dim]
        if x.shape[dim]:
            last = [one.narrow(dim, x.shape[dim] - 1, 1) for one in (values, places)]
        else:
            last = [empty_summary(one, (dim,), kept.dtype)
                    for one, kept in ((x, values), (places, places))]
        ends, wheres = (shards.gather(one)[0] for one in last)
        before = [at for at in shards.filled if at < shards.index]
        if not before:
            return shards.tie(values, ends), places
        carry, which = function(ends[before], 0)
        where = wheres[before].gather(0, which[-1:])[0]
        carry = carry[-1]
        fixed, held = values.detach(), carry.detach()
        mine = beats(fixed, held) | (fixed != fixed)
        return torch.where(mine, values, carry), torch.where(mine, places, where)

    kernel.__doc__ = "Each shard's own extrema, and the last one of the shards before it."
    return kernel


PAGE = page(
    op("cumsum", rule("... s~ -> ... s", along="dim", linear=[0]), kernel=_cumsum,
       result=_cumsum_result),
    op("cumprod", rule("... s~ -> ... s", along="dim"), kernel=_cumprod),
    *[op(name, rule("... s~ -> ... s, ... s", along="dim", on_box=unless_idle),
         kernel=_extreme(largest)) for name, largest in (("cummax", True), ("cummin", False))],
    op("logcumsumexp", rule("... s! -> ... s", along="dim", serves=is_complex),
       rule("... s~ -> ... s", along="dim"), kernel=_logcumsumexp),
)
