"""Reductions: sum, mean, prod, logsumexp, all, any. They leave partial values, or the product or
logarithm over all shards.

Half precision is reduced in float32: partial values in half would be rounded one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops.idle import empty_summary
from weft.ops.precision import HALF, wide
from weft.rules import Call, Text, op, page, rule
from weft.rules.factors import dim_list, sharded_along
from weft.transport import Shards

__all__ = [
    "PAGE", "exp_sums", "in_half", "is_complex", "is_rounded_once", "log_of_sums", "of_all",
    "without",
]


def without(out: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """A result whose reduced dims were kept, with or without them."""
    return out if keepdim else out.squeeze(tuple(dims))


def _mean(
    shards: Shards, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """Each shard's sum divided by the global count, whatever the sizes of the shards."""
    dims = dim_list(dim, shards.layout.ndim)
    count = math.prod([shards.layout.shape[each] for each in dims])
    return x.sum(dims, keepdim, dtype=dtype) / count


def _mean_of_half(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """The mean in float32, rounded once it is complete."""
    return x.mean(dim, keepdim, dtype=torch.float32).to(dtype or x.dtype)


def in_half(call: Call) -> bool:
    """Whether the result is of half precision."""
    return getattr(torch, call.results[0].dtype) in HALF


def is_rounded_once(call: Call) -> bool:
    """Whether half precision, if any, is summed on one rank: the kernel there rounds the sum."""
    return not (in_half(call) and sharded_along(call))


def _prod_rule(call: Call, wants_grad: Sequence[bool]) -> str:
    """A partial product has no gradient of its own for hooks to see."""
    return "... s~ -> ..." if True in wants_grad else "... s:product -> ..."


def _prod(
    shards: Shards, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """The product of the products of all shards."""
    dims, dtype = dim_list(dim, shards.layout.ndim), dtype or x.dtype
    for each in dims:
        x = x.prod(each, keepdim=True, dtype=wide(dtype))
    return without(shards.gather(x)[0].prod(0).to(dtype), dims, keepdim)


def exp_sums(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The maximum of a shard (without gradient) and sum exp(x - maximum), dims kept.

    Where the maximum is infinite, the sum uses 0 instead.
    """
    dims = tuple(dims)
    if any(x.shape[dim] == 0 for dim in dims):
        none = empty_summary(x, dims, x.dtype)
        return none.detach() - torch.inf, none
    largest = x.detach().amax(dims, keepdim=True)
    return largest, (x - _finite(largest)).exp().sum(dims, keepdim=True)


def log_of_sums(largest: Tensor, sums: Tensor) -> Tensor:
    """The logsumexp over shards, from the results of `exp_sums` stacked in dim 0."""
    largest = largest.detach()
    top = _finite(largest.amax(0))
    return (sums * (_finite(largest, below=True) - top).exp()).sum(0).log() + top


def _finite(largest: Tensor, below: bool = False) -> Tensor:
    """0 for infinite maxima, which `exp_sums` replaced; with `below`, -inf stays and weighs 0."""
    infinite = largest.isposinf() if below else largest.isinf()
    return torch.where(infinite, 0.0, largest)


def is_complex(call: Call) -> bool:
    """Sums of complex exponentials have no maximum to scale by."""
    return call.results[0].dtype.startswith("complex")


def _logsumexp(shards: Shards, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """Each shard's maximum, and its sum of exponentials relative to it."""
    dims, dtype = dim_list(dim, shards.layout.ndim), x.dtype
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    largest, sums = shards.gather(*exp_sums(x.to(wide(dtype)), dims))
    return without(log_of_sums(largest, sums).to(dtype), dims, keepdim)


def _truth_rule(of_bools: str, of_bytes: str) -> Text:
    """`all` and `any` of bytes give bytes, 0 or 1."""
    return lambda call, wants_grad: (
        f"... s:{of_bools if call.results[0].dtype == 'bool' else of_bytes} -> ..."
    )


_EACH = rule("... -> ...", serves=lambda call: call.get("dim") in ((), []))
"""`all` and `any` over no dims: of each element."""


def _mean_result(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    """As of a sum, whose meta kernel is not in Python."""
    if dtype is not None or not x.is_floating_point():
        return None
    return torch.ops.aten.sum.dim_IntList(x, dim, keepdim)


def of_all(overload: Any) -> Callable[..., Tensor | None]:
    """Reductions of which torch's meta kernels take no dims for none, and the others for all."""
    def form(x: Tensor, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
        return overload(x, None, keepdim, **named) if dim is not None and not len(dim) else None

    return form


PAGE = page(
    op("sum", rule("... s -> ...", along="dim", linear=[0])),
    op("nansum", rule("... s -> ...", along="dim"), result=of_all(torch.ops.aten.nansum.default)),
    op("count_nonzero linalg__powsum", rule("... s -> ...", along="dim")),
    op("mean", rule("... s~:sum -> ...", along="dim", linear=[0], serves=is_rounded_once),
       kernel=_mean, compose=_mean_of_half, result=_mean_result),
    op("prod", rule(_prod_rule, along="dim"), kernel=_prod),
    op("logsumexp special_logsumexp", rule("... s! -> ...", along="dim", serves=is_complex),
       rule("... s~ -> ...", along="dim"), kernel=_logsumexp),
    op("all", _EACH, rule(_truth_rule("and", "min"), along="dim")),
    op("any", _EACH, rule(_truth_rule("or", "max"), along="dim")),
    # torch.distributions checks its arguments this way.
    op("_is_all_true", rule("... s:and -> ...", along="dim")),
    op("_is_any_true", rule("... s:or -> ...", along="dim")),
)
