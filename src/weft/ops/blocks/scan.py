"""Scans along a cut dim: cumsum, cumprod, cummax, cummin, logcumsumexp.

Each rank scans its block; what a block comes to is gathered, and each rank combines what the
blocks before its own come to with its own scan (Blelloch, Prefix Sums and Their Applications,
1990). A rank receives one slice per block, whatever the length of the dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Local
from weft.ops.blocks.logsum import exp_sums, log_of_sums
from weft.ops.blocks.summaries import Blocks, dtype_of, nothing_of, tied, whole_terms, wide
from weft.rules import Call, Decision
from weft.rules.factors import carries

__all__ = ["scan_lookup"]

Scan = Callable[[Blocks, Tensor, int, torch.dtype], Any]


def scan_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """A scan along a cut dim."""
    layout = layouts[0]
    if not layout.ndim:
        return None
    dim = call.args[1] % layout.ndim
    if not layout.dims[dim] or not layout.shape[dim]:
        return None
    name, dtype = call.op.split(".")[1], dtype_of(call)
    if not (name == "cumsum" and _passes(layout, call)):
        layout = whole_terms(layout)
    if name == "logcumsumexp" and dtype.is_complex:
        return None
    scan = _SCANS[name]

    def bind(bound: BoundMesh) -> Callable[[Tensor], Any]:
        blocks = Blocks(bound, layout, (dim,))
        return lambda x: scan(blocks, x, dim, dtype)

    return Local(
        Decision((layout,), (layout,) * len(call.results)), bind, communicates=layout.dims[dim]
    )


def _passes(layout: Layout, call: Call) -> bool:
    """Whether the terms of a sum may be scanned each by itself."""
    return set(layout.partial) <= {None, "sum", "avg"} and carries(
        call.tensors[0].dtype, call.results[0].dtype
    )


def _total(blocks: Blocks, x: Tensor, own: Tensor, dim: int) -> Tensor:
    """The last slice of a block's scan."""
    if not x.shape[dim]:
        return nothing_of(x, (dim,), own.dtype)
    return own.narrow(dim, x.shape[dim] - 1, 1)


def _cumsum(blocks: Blocks, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    own = x.cumsum(dim, dtype=wide(dtype))
    (totals,) = blocks.gather(_total(blocks, x, own, dim))
    if blocks.mine == 0:
        return tied(own.to(dtype), totals)
    return (own + totals[: blocks.mine].sum(0, dtype=own.dtype)).to(dtype)


def _cumprod(blocks: Blocks, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    own = x.cumprod(dim, dtype=wide(dtype))
    total = _total(blocks, x, own, dim) if x.shape[dim] else nothing_of(x, (dim,), own.dtype) + 1
    (totals,) = blocks.gather(total)
    if blocks.mine == 0:
        return tied(own.to(dtype), totals)
    return (own * totals[: blocks.mine].prod(0)).to(dtype)


def _logcumsumexp(blocks: Blocks, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    x = x.to(wide(dtype))
    largest, sums = blocks.gather(*exp_sums(x, (dim,)))
    before = [at for at in blocks.filled if at < blocks.mine]
    if not before:
        return tied(x.logcumsumexp(dim).to(dtype), sums)
    carry = log_of_sums(
        torch.stack([largest[at] for at in before]), torch.stack([sums[at] for at in before])
    )
    out = torch.cat([carry, x], dim).logcumsumexp(dim)
    return out.narrow(dim, 1, x.shape[dim]).to(dtype, copy=True)


def _of_block(largest: bool) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    """cummax or cummin of a block. Of nothing torch takes the operand itself for its gradient,
    which then has other gradients than on the other ranks."""
    function = torch.cummax if largest else torch.cummin

    def scan(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        if x.numel():
            return function(x, dim)
        return x.clone(), torch.empty_like(x, dtype=torch.int64, requires_grad=False)

    return scan


def _extreme(largest: bool) -> Scan:
    """cummax and cummin: the later of equal elements counts, and the latest NaN."""
    function = _of_block(largest)
    beats = torch.ge if largest else torch.le

    def scan(blocks: Blocks, x: Tensor, dim: int, dtype: torch.dtype) -> Any:
        values, places = function(x, dim)
        start, _ = blocks.layout.interval(dim, blocks.mine)
        places = places + start
        if x.shape[dim]:
            last = [one.narrow(dim, x.shape[dim] - 1, 1) for one in (values, places)]
        else:
            last = [nothing_of(x, (dim,), values.dtype), nothing_of(places, (dim,), places.dtype)]
        ends, wheres = (blocks.gather(one)[0] for one in last)
        before = [at for at in blocks.filled if at < blocks.mine]
        if not before:
            return tied(values, ends), places
        ends = torch.stack([ends[at] for at in before])
        carry, which = function(ends, 0)
        where = torch.stack([wheres[at] for at in before]).gather(0, which[-1:])[0]
        carry = carry[-1]
        fixed, held = values.detach(), carry.detach()
        mine = beats(fixed, held) | (fixed != fixed)
        return torch.where(mine, values, carry), torch.where(mine, places, where)

    return scan


_SCANS: dict[str, Scan] = {
    "cumsum": _cumsum, "cumprod": _cumprod, "logcumsumexp": _logcumsumexp,
    "cummax": _extreme(True), "cummin": _extreme(False),
}
