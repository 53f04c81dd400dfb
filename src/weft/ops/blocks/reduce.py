"""Reductions over cut dims that stay partial: the mean (a sum of shares), amax and amin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Local
from weft.ops.blocks.summaries import is_cut, left, reduced
from weft.rules import Call, Decision
from weft.rules.factors import carries

__all__ = ["amax_lookup", "aminmax_lookup", "mean_lookup", "shared_over"]

_HALF = ("float16", "bfloat16")


def mean_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """The mean over cut dims: each shard's sum by the true global count, whatever the sizes."""
    layout, result = layouts[0], call.results[0]
    has_dims = call.op != "aten.mean.default"
    dims = reduced(layout, call.args[1] if has_dims else None)
    keepdim = has_dims and bool(call.args[2])
    if not is_cut(layout, dims):
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

    decision = Decision((layout,), (left(call.results[0].shape, layout, dims, keepdim, "sum"),))
    return Local(decision, lambda mesh: local)


def _wide_mean(x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: str) -> torch.Tensor:
    return torch.mean(x, dims, keepdim, dtype=torch.float32).to(getattr(torch, dtype))


def amax_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """amax, amin over cut dims, and max, min of everything."""
    layout = layouts[0]
    whole = call.op in ("aten.max.default", "aten.min.default")
    dims = reduced(layout, None if whole else call.args[1])
    if not is_cut(layout, dims) or layout.is_partial:
        return None
    largest = "max" in call.op
    keepdim = False if whole else bool(call.args[2])
    if wants_grad[0]:
        return Composite(lambda x, *args, **kwargs: attained(x, dims, keepdim, largest))
    return _local_extremum(call, layout, dims, keepdim, largest)


def _local_extremum(
    call: Call, layout: Layout, dims: tuple[int, ...], keepdim: bool, largest: bool
) -> Local:
    """Each shard's own extremum, an empty one contributing the identity; P(max) or P(min)."""
    result = left(call.results[0].shape, layout, dims, keepdim, "max" if largest else "min")

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


def attained(x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, largest: bool) -> Any:
    """The extremum with torch's gradient: shared over the elements that attain it."""
    reduce = torch.amax if largest else torch.amin
    out = shared_over(x, reduce(x.detach(), dims, keepdim=True), dims)
    return out if keepdim else out.squeeze(dims)


def shared_over(x: torch.Tensor, value: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """`value`, which elements of `x` attain; they share its gradient."""
    attains = x.detach() == value
    count = attains.sum(dims, keepdim=True).to(x.dtype)
    share = (torch.where(attains, x, 0.0) / count).sum(dims, keepdim=True)
    # The shares add up to the value but for rounding: make it exact, keep the gradient.
    rest = (value - share.detach()).nan_to_num(0.0, 0.0, 0.0)
    return share + rest


def aminmax_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """aminmax over cut dims: amin and amax."""
    layout = layouts[0]
    dim = call.kwargs["dim"]
    if not is_cut(layout, reduced(layout, dim)):
        return None
    dims = () if dim is None else dim

    def aminmax(x: torch.Tensor, *, dim: Any, keepdim: bool) -> Any:
        return x.amin(dims, keepdim), x.amax(dims, keepdim)

    return Composite(aminmax)
