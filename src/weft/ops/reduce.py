"""Reductions over cut dims that are more than a sum of sums: mean, extrema, norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Local
from weft.rules import Call, Decision
from weft.rules.factors import carries

__all__ = ["amax_lookup", "mean_lookup", "vector_norm_lookup"]

_HALF = ("float16", "bfloat16")


def _reduced(layout: Layout, dims: Any) -> tuple[int, ...]:
    """The dims that are reduced, non-negative; None or () means all."""
    if dims is None or dims == [] or dims == ():
        return tuple(range(layout.ndim))
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(sorted({dim % max(layout.ndim, 1) for dim in dims}))


def _is_cut(layout: Layout, dims: Sequence[int]) -> bool:
    return any(layout.dims[dim] for dim in dims if dim < layout.ndim)


def mean_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """The mean over cut dims: each shard's sum by the true global count, whatever the sizes."""
    layout, result = layouts[0], call.results[0]
    has_dims = call.op != "aten.mean.default"
    dims = _reduced(layout, call.args[1] if has_dims else None)
    keepdim = has_dims and bool(call.args[2])
    if not _is_cut(layout, dims):
        return None
    if result.dtype in _HALF:  # terms in half precision would be rounded before they are added
        return Composite(lambda x, *args, **kwargs: _wide_mean(x, dims, keepdim, result.dtype))
    if layout.is_partial and not (
        set(layout.partial) <= {None, "sum", "avg"} and carries(call.tensors[0].dtype, result.dtype)
    ):
        layout = layout.replace(cuts=layout.cuts, partial=(None,) * layout.mesh.ndim)
    count = math.prod(layout.shape[dim] for dim in dims)
    dtype = getattr(torch, result.dtype)

    def local(x: torch.Tensor) -> torch.Tensor:
        return x.sum(dims, keepdim, dtype=dtype) / count

    decision = Decision((layout,), (_left(call, layout, dims, keepdim, "sum"),))
    return Local(decision, lambda mesh: local)


def _wide_mean(x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: str) -> torch.Tensor:
    return torch.mean(x, dims, keepdim, dtype=torch.float32).to(getattr(torch, dtype))


def _left(
    call: Call, layout: Layout, dims: Sequence[int], keepdim: bool, kind: str
) -> Layout:
    """What is left when each shard has reduced its part of `dims`: terms of `kind`."""
    partial = list(layout.partial)
    for dim in dims:
        for axis in layout.dims[dim]:
            partial[axis] = kind
    kept = [dim for dim in range(layout.ndim) if keepdim or dim not in dims]
    return Layout.make(
        layout.mesh, call.results[0].shape,
        [() if dim in dims else layout.dims[dim] for dim in kept],
        [None if dim in dims else layout.cuts[dim] for dim in kept],
        partial,
    )


def amax_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """amax, amin over cut dims, and max, min of everything."""
    layout = layouts[0]
    whole = call.op in ("aten.max.default", "aten.min.default")
    dims = _reduced(layout, None if whole else call.args[1])
    if not _is_cut(layout, dims) or layout.is_partial:
        return None
    largest = "max" in call.op
    keepdim = False if whole else bool(call.args[2])
    if wants_grad[0]:
        return Composite(lambda x, *args, **kwargs: _attained(x, dims, keepdim, largest))
    return _local_extremum(call, layout, dims, keepdim, largest)


def _local_extremum(
    call: Call, layout: Layout, dims: tuple[int, ...], keepdim: bool, largest: bool
) -> Local:
    """Each shard's own extremum, an empty one contributing the identity; P(max) or P(min)."""
    result = _left(call, layout, dims, keepdim, "max" if largest else "min")

    def bind(mesh: BoundMesh) -> Callable[[torch.Tensor], torch.Tensor]:
        assert mesh.here is not None
        shape = result.local_shape_at(mesh.here)
        reduce = torch.amax if largest else torch.amin

        def local(x: torch.Tensor) -> torch.Tensor:
            if any(x.shape[dim] == 0 for dim in dims):
                return x.new_full(shape, _identity(x.dtype, largest))
            return reduce(x, dims, keepdim)

        return local

    return Local(Decision((layout,), (result,)), bind)


def _identity(dtype: torch.dtype, largest: bool) -> Any:
    if dtype is torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    info = torch.iinfo(dtype)
    return info.min if largest else info.max


def _attained(x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, largest: bool) -> Any:
    """The extremum with torch's gradient: shared over the elements that attain it."""
    reduce = torch.amax if largest else torch.amin
    fixed = x.detach()
    value = reduce(fixed, dims, keepdim=True)
    attains = fixed == value
    count = attains.sum(dims, keepdim=True).to(x.dtype)
    share = (torch.where(attains, x, 0.0) / count).sum(dims, keepdim=True)
    # The shares add up to the value but for rounding: make it exact, keep the gradient.
    rest = (value - share.detach()).nan_to_num(0.0, 0.0, 0.0)
    out = share + rest
    return out if keepdim else out.squeeze(dims)


def vector_norm_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """Vector norms over cut dims where no gradient is wanted (gradient clipping)."""
    layout = layouts[0]
    dims = _reduced(layout, call.args[2])
    if wants_grad[0] or not (_is_cut(layout, dims) or layout.is_partial):
        return None

    def norm(
        x: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False,
        *, dtype: Any = None, out: Any = None,
    ) -> torch.Tensor:
        kept = dtype or x.dtype
        x = x.to(torch.float32 if kept in (torch.float16, torch.bfloat16) else kept)
        size = x.abs()
        if math.isinf(ord):
            return (size.amax if ord > 0 else size.amin)(dims, keepdim).to(kept)
        if ord == 0:
            return (size != 0).sum(dims, keepdim).to(kept)
        if ord == 2:
            return (size * size).sum(dims, keepdim).sqrt().to(kept)
        return (size**ord).sum(dims, keepdim).pow(1.0 / ord).to(kept)

    return Composite(norm)
