"""Variances, norms and related ops: std, var, norm, cosine_similarity, renorm, nanmean.

Moments of shards are joined about the true mean (Chan, Golub and LeVeque, Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances, 1979), never by E[x^2] - E[x]^2. The norm of the
whole is the norm of the shards' norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops.extrema import extreme_text, extremum
from weft.ops.idle import empty_summary, unless_idle
from weft.ops.precision import HALF, wide, widened
from weft.ops.reductions import in_half, is_rounded_once, of_all, without
from weft.rules import Call, Entry, op, page, rule
from weft.rules.factors import dim_list, sharded_along
from weft.transport import Shards

__all__ = ["PAGE"]


def _variance(root: bool, with_mean: bool) -> Callable[..., Any]:
    """The kernel of var, std, var_mean and std_mean, for every overload."""
    def kernel(
        shards: Shards, x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False,
        *, correction: Any = None,
    ) -> Any:
        if isinstance(dim, bool):  # over all dims, where `unbiased` is the second argument
            dim, unbiased = None, dim
        if correction is None:
            correction = int(unbiased)
        dims = dim_list(dim, shards.layout.ndim)
        mean, squares, count = _moments(shards, widened(x), dims)
        spread = squares / max(count - correction, 0)
        spread = _root(spread) if root else spread
        spread = without(spread.to(x.dtype.to_real()), dims, keepdim)
        return (spread, without(mean.to(x.dtype), dims, keepdim)) if with_mean else spread

    kernel.__doc__ = "The moments of all shards, joined about the true mean."
    return kernel


def _moments(shards: Shards, x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, int]:
    """The mean of all elements, the sum of their squared deviations from it, and their number."""
    if x.numel():  # in two passes, a few times as fast on CPUs as torch.var_mean's one
        mean = x.mean(dims, keepdim=True)
        # The gradient of x - mean would be negated before it is summed.
        var = _squares(x + -mean).mean(dims, keepdim=True)
    else:
        mean = empty_summary(x, dims, x.dtype)
        var = mean.real if x.is_complex() else mean
    vars_, means = shards.gather(var, mean)
    counts = shards.counts(x, dims)
    weights = torch.tensor(counts, dtype=vars_.dtype, device=x.device).view(-1, *[1] * x.dim())
    mean = (means * (weights / sum(counts))).sum(0)
    return mean, ((vars_ + _squares(means - mean)) * weights).sum(0), sum(counts)


def _squares(x: Tensor) -> Tensor:
    return (x * x.conj()).real if x.is_complex() else x * x


def _root(squares: Tensor) -> Tensor:
    """The square root with gradient 0 at 0, as in torch.std."""
    none = squares == 0
    return torch.where(none, 0.0, torch.where(none, 1.0, squares).sqrt())


def _norm_rule(call: Call, wants_grad: Sequence[bool]) -> Any:
    order = call.args[1]
    if order is not None and math.isinf(order):
        return extreme_text(order > 0)(call, wants_grad)
    return "... s~ -> ..."


def _norm(
    shards: Shards, x: Tensor, order: Any = 2, dim: Any = None, keepdim: bool = False, *,
    dtype: Any = None,
) -> Tensor:
    """The norm of the shards' norms; for infinite order the extremum of the magnitudes."""
    dims, order = dim_list(dim, shards.layout.ndim), 2.0 if order is None else float(order)
    x = x if dtype is None else x.to(dtype)
    if math.isinf(order):
        return extremum(shards, x.abs(), dims, keepdim, order > 0)
    norm = _norm_of_all(shards, x, order, dims)
    return without(norm.to(x.dtype.to_real()), dims, keepdim)


def _norm_of_all(shards: Shards, x: Tensor, order: float, dims: tuple[int, ...]) -> Tensor:
    """The norm of all shards' elements, keeping dims, half precision in float32."""
    x = widened(x)
    if math.isinf(order):
        largest = extremum(shards, x.abs(), dims, True, True)
        return shards.psum(largest) if largest.requires_grad else shards.pmax(largest)
    if shards.sizes[shards.index] or order == 0:  # order 0 has no gradient, on all ranks
        own = torch.linalg.vector_norm(x, order, dims, True)
    else:
        own = empty_summary(x, dims, x.dtype)
        own = own.real if x.is_complex() else own
    norms = shards.of_filled(shards.gather(own)[0])
    return norms.sum(0) if order == 0 else torch.linalg.vector_norm(norms, order, 0)


def _nanmean(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """The sum of the numbers divided by their count."""
    dtype = dtype or x.dtype
    dim = tuple(range(x.dim())) if dim is None or dim == [] else dim
    count = x.isnan().logical_not().sum(dim, keepdim)
    return (x.nansum(dim, keepdim, dtype=wide(dtype)) / count).to(dtype)


def _vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    """The sum of products in float32, rounded once it is complete."""
    return (widened(x).conj() * y).sum(dim).to(x.dtype)


def _cosine_rule(call: Call, wants_grad: Any) -> str:
    """Partial values; in half precision, where they would be rounded, the whole."""
    return "... s~, ... s~ -> ..." if in_half(call) else "... s~:sum, ... s~:sum -> ..."


def _cosine(shards: Shards, x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The norms over all shards, then the sum of each shard's products."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    dim = dim % max(x.dim(), y.dim()) - max(x.dim(), y.dim())
    both = [one.to(wide(dtype)) for one in torch.broadcast_tensors(x, y)]
    every = shards.gather(*[torch.linalg.vector_norm(one, 2, dim, True) for one in both])
    norms = [torch.linalg.vector_norm(one, 2, 0) for one in every]
    least = [one.detach().clamp_min(eps) for one in norms]
    x, y = (one / size for one, size in zip(both, least))
    out = (x * y).sum(dim)
    # Each norm is 1 here except for its gradient, which is of few numbers, not of all elements.
    # torch's gradient ignores `eps` where `eps` is the larger.
    for norm, size in zip(norms, least):
        out = out * (size / (norm + (size - norm.detach()))).squeeze(dim)
    return shards.psum(out).to(dtype) if dtype in HALF else out


def _is_aligned(call: Call) -> bool:
    """Whether the dim is that of both operands; otherwise one row may broadcast."""
    ndims = {len(tensor.shape) for tensor in call.tensors}
    return len(ndims) == 1 or call.get("dim") in (-1, max(ndims) - 1)


def _renorm(shards: Shards, x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Slices along the dim shrink to the norm, which is computed over all shards."""
    dims = _others(dim, x.dim())
    norms = _norm_of_all(shards, x, float(p), dims)
    shrunk = torch.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1.0)
    return x * shrunk.to(x.dtype)


def _others(dim: int, ndim: int) -> tuple[int, ...]:
    return tuple([at for at in range(ndim) if at != dim % ndim])


def _spread(name: str) -> Entry:
    """One of the four. torch warns of too few degrees of freedom where a shard is empty."""
    root, with_mean = name.startswith("std"), name.endswith("mean")
    text = "... s~ -> ..., ..." if with_mean else "... s~ -> ..."
    kernel = _variance(root, with_mean)
    words = name if with_mean else "std and var"

    def check(x: Tensor, *args: Any, **kwargs: Any) -> None:
        """torch's meta kernels take all dtypes; the result is theirs."""
        if not (x.is_floating_point() or x.is_complex()):
            raise RuntimeError(f"{words} only support floating point and complex dtypes")

    return op(name, rule(text, along="dim", on_box=unless_idle), kernel=kernel, result=check)


PAGE = page(
    *map(_spread, ("var", "std", "var_mean", "std_mean")),
    op("linalg_vector_norm norm", rule(_norm_rule, along="dim"), kernel=_norm),
    op("linalg_matrix_norm",
       rule("...>0 s! -> ...", along="dim", default=(-2, -1),
            serves=lambda call: call.args[1] in (2, -2, "nuc"))),
    op("nanmean", rule("... s! -> ...", along="dim", serves=lambda call: not sharded_along(call)),
       compose=_nanmean, result=of_all(torch.ops.aten.nanmean.default)),
    op("linalg_vecdot", rule("... s, ... s -> ...", along="dim", default=-1,
                             serves=lambda call: _is_aligned(call) and is_rounded_once(call)),
       compose=_vecdot),
    op("cosine_similarity", rule(_cosine_rule, along="dim", default=1, serves=_is_aligned),
       kernel=_cosine),
    op("renorm", rule("... s~ -> ... s", along=lambda call, ndim: _others(call.args[2], ndim)),
       kernel=_renorm),
)
