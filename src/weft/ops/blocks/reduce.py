"""Reductions over cut dims that stay partial: the mean (a sum of shares), amax and amin; and the
product, whose factors have no gradients without each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Local
from weft.ops.blocks.summaries import (
    Blocks,
    blocks_axes,
    dtype_of,
    finish,
    is_cut,
    left,
    reduced,
    wide,
)
from weft.rules import Call, Decision
from weft.rules.factors import carries
from weft.transport import Transition

__all__ = ["amax_lookup", "aminmax_lookup", "mean_lookup", "prod_lookup", "shared_over"]

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
        return _attained(call, layout, dims, keepdim, largest)
    return _local_extremum(call, layout, dims, keepdim, largest)


def _local_extremum(
    call: Call, layout: Layout, dims: tuple[int, ...], keepdim: bool, largest: bool
) -> Local:
    """Each shard's own extremum, an empty one contributing the identity; P(max) or P(min)."""
    result = left(call.results[0].shape, layout, dims, keepdim, "max" if largest else "min")

    def bind(mesh: BoundMesh) -> Callable[[torch.Tensor], torch.Tensor]:
        assert mesh.here is not None
        shape = result.local_shape_at(mesh.here)
        return lambda x: _extremum(x, shape, dims, keepdim, largest)

    return Local(Decision((layout,), (result,)), bind)


def _extremum(
    x: torch.Tensor, shape: tuple[int, ...], dims: tuple[int, ...], keepdim: bool, largest: bool
) -> torch.Tensor:
    """The extremum of a block, of this shape."""
    if any(x.shape[dim] == 0 for dim in dims):
        return x.new_full(shape, _identity(x.dtype, largest))
    return (torch.amax if largest else torch.amin)(x, dims, keepdim)


def _identity(dtype: torch.dtype, largest: bool) -> Any:
    if dtype is torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    info = torch.iinfo(dtype)
    return info.min if largest else info.max


def _attained(
    call: Call, layout: Layout, dims: tuple[int, ...], keepdim: bool, largest: bool
) -> Local:
    """The extremum with torch's gradient: shared over the elements that attain it. All ranks come
    to know the extremum and how many attain it; the result is what one rank says of it, as terms,
    so that every rank receives the whole of its gradient."""
    axes = blocks_axes(layout, dims)
    kept = [1 if dim in dims else length for dim, length in enumerate(layout.shape)]
    whole = left(kept, layout, dims, True)
    extrema = left(kept, layout, dims, True, "max" if largest else "min")
    counts = left(kept, layout, dims, True, "sum")
    result = left(call.results[0].shape, layout, dims, keepdim, "sum")

    def bind(mesh: BoundMesh) -> Callable[[torch.Tensor], torch.Tensor]:
        assert mesh.here is not None
        reach, add = Transition(mesh, extrema, whole), Transition(mesh, counts, whole)
        shape = whole.local_shape_at(mesh.here)
        says = not any(mesh.here[axis] for axis in axes)

        def local(x: torch.Tensor) -> torch.Tensor:
            given = x.detach()
            value = reach(_extremum(given, shape, dims, True, largest))
            attain = given == value
            count = add(attain.sum(dims, keepdim=True))
            term = value if says else torch.zeros_like(value)
            out = _Shared.apply(x, term, attain, count)
            return out if keepdim else out.squeeze(dims)

        return local

    return Local(Decision((layout,), (result,)), bind, communicates=axes)


class _Shared(torch.autograd.Function):
    """A value that elements of x attain; they share its gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, value: torch.Tensor, attain: torch.Tensor, count: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(attain, count)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        attain, count = ctx.saved_tensors
        return grad * attain / count, None, None, None


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


def prod_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """prod over cut dims, where a gradient is wanted: the value, of the products of all blocks.

    As P(product), which the rule gives, it had no gradient of its own for hooks to see.
    """
    layout, dtype = layouts[0], dtype_of(call)
    has_dim = call.op == "aten.prod.dim_int"
    dims = reduced(layout, call.args[1] if has_dim else None)
    if not wants_grad[0] or not is_cut(layout, dims):
        return None

    def function(blocks: Blocks, x: torch.Tensor) -> torch.Tensor:
        own = x
        for dim in dims:
            own = own.prod(dim, keepdim=True, dtype=wide(dtype))
        (factors,) = blocks.gather(own)
        return factors.prod(0).to(dtype)

    return finish(call, layout, dims, has_dim and bool(call.args[2]), function)
