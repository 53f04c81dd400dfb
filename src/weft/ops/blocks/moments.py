"""Variances and norms over cut dims, by what each block makes of its own elements.

Moments of blocks are joined about the true mean (Chan, Golub and LeVeque, Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances, 1979), never by E[x^2] - E[x]^2. The norm of the
blocks' norms is the norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite
from weft.ops.blocks.summaries import Blocks, dtype_of, finish, is_cut, nothing_of, reduced, wide
from weft.rules import Call

__all__ = [
    "cosine_lookup", "matrix_norm_lookup", "nanmean_lookup", "norm_lookup", "renorm_lookup",
    "variance_lookup", "vecdot_lookup",
]


def variance_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """var, std, var_mean and std_mean over cut dims that have elements, and of empty blocks."""
    layout = layouts[0]
    given, correction, keepdim = _arguments(call)
    dims = reduced(layout, given)
    count = math.prod(layout.shape[dim] for dim in dims)
    # torch warns of too few degrees of freedom where a block has no elements.
    empty = any(0 in layout.sizes_of(dim) for dim in range(layout.ndim) if dim not in dims)
    if not count or not (is_cut(layout, dims) or empty):
        return None
    name = call.op.split(".")[1]
    dtype = getattr(torch, call.tensors[0].dtype)

    def function(blocks: Blocks, x: Tensor) -> Any:
        mean, squares = _moments(blocks, x.to(wide(dtype)), dims, count)
        spread = squares / max(count - correction, 0)
        if name.startswith("std"):
            spread = _root(spread)
        spread = spread.to(dtype_of(call))
        return (spread, mean.to(dtype)) if name.endswith("mean") else spread

    return finish(call, layout, dims, keepdim, function)


def _arguments(call: Call) -> tuple[Any, float, bool]:
    """The dims, what is taken off the count, and keepdim, of any overload."""
    overload = call.op.split(".")[2]
    if overload == "correction":
        correction = call.kwargs["correction"]
        return call.args[1], 1 if correction is None else correction, bool(call.kwargs["keepdim"])
    if overload == "dim":
        return call.args[1], int(call.args[2]), bool(call.args[3])
    return None, int(call.args[1]), False


def _moments(
    blocks: Blocks, x: Tensor, dims: tuple[int, ...], count: int
) -> tuple[Tensor, Tensor]:
    """The mean of all elements, and the sum of the squares of what they differ from it by."""
    if x.numel():  # in two passes, a few times as fast on CPUs as torch.var_mean's one
        mean = x.mean(dims, keepdim=True)
        # The gradient of x - mean would be negated before it is summed.
        var = _squares(x + -mean).mean(dims, keepdim=True)
    else:
        mean = nothing_of(x, dims, x.dtype)
        var = mean.real if x.is_complex() else mean
    vars_, means = blocks.gather(var, mean)
    weights = torch.tensor(blocks.sizes, dtype=vars_.dtype, device=x.device)
    weights = weights.view(-1, *[1] * x.dim())
    mean = (means * (weights / count)).sum(0)
    return mean, ((vars_ + _squares(means - mean)) * weights).sum(0)


def _squares(x: Tensor) -> Tensor:
    return (x * x.conj()).real if x.is_complex() else x * x


def _root(squares: Tensor) -> Tensor:
    """The square root, whose gradient at 0 is 0, as that of torch.std is."""
    none = squares == 0
    return torch.where(none, 0.0, torch.where(none, 1.0, squares).sqrt())


def norm_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`linalg_vector_norm` and `norm` of any order over cut dims that have elements."""
    layout = layouts[0]
    vector = call.op.startswith("aten.linalg_vector_norm")
    dims, keepdim = reduced(layout, call.arg(2, "dim")), bool(call.arg(3, "keepdim"))
    order = call.args[1]
    if not is_cut(layout, dims) or not all(layout.shape[dim] for dim in dims):
        return None
    order = 2.0 if order is None else float(order)
    dtype = dtype_of(call)
    if math.isinf(order) and (wants_grad[0] or not vector):
        # Torch shares the gradient over elements that attain the norm, as amax does.
        def extreme(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            size = x.abs()
            return (size.amax if order > 0 else size.amin)(dims, keepdim).to(dtype)

        return Composite(extreme)
    if math.isinf(order):
        return None  # the rule's maxima and minima of magnitudes

    def function(blocks: Blocks, x: Tensor) -> Tensor:
        x = x.to(_in(x.dtype, wide(dtype)))
        if blocks.sizes[blocks.mine] or order == 0:  # whose gradient is None, on all ranks
            own = torch.linalg.vector_norm(x, order, dims, True)
        else:
            own = nothing_of(x, dims, x.dtype)
            own = own.real if x.is_complex() else own
        norms = blocks.of_filled(blocks.gather(own)[0])
        if order == 0:
            return norms.sum(0).to(dtype)
        return torch.linalg.vector_norm(norms, order, 0).to(dtype)

    return finish(call, layout, dims, keepdim, function)


def _in(given: torch.dtype, real: torch.dtype) -> torch.dtype:
    """The dtype of another's precision, complex where the given one is."""
    return real.to_complex() if given.is_complex and not real.is_complex else real


def matrix_norm_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`linalg.matrix_norm` of cut matrices, where it is made of sums and extrema of magnitudes."""
    layout, order = layouts[0], call.args[1]
    rows, columns = (dim % layout.ndim for dim in call.args[2])
    if not is_cut(layout, (rows, columns)) or order in (2, -2, "nuc"):
        return None

    def norm(x: Tensor, ord: Any, dim: Any, keepdim: bool, *, dtype: Any = None) -> Tensor:
        x = x if dtype is None else x.to(dtype)
        if ord == "fro":
            return torch.linalg.vector_norm(x, 2, (rows, columns), keepdim)
        added, kept = (rows, columns) if abs(ord) == 1 else (columns, rows)
        sums = x.abs().sum(added, keepdim=True)
        if ord > 0 and not sums.shape[kept]:  # torch has zeros here, and no gradient
            out = sums.detach().sum(kept, keepdim=True)
        else:
            out = sums.amax(kept, keepdim=True) if ord > 0 else sums.amin(kept, keepdim=True)
        return out if keepdim else out.squeeze((rows, columns))

    return Composite(norm)


def vecdot_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`linalg.vecdot` along a dim that is cut in one operand: a sum of products."""
    shape, dim = call.results[0].shape, call.kwargs["dim"]
    if dim >= 0 and any(len(one.shape) != len(shape) + 1 for one in call.tensors):
        return None  # of which operand it counts
    if not any(layout.dims[dim] for layout in layouts):
        return None
    dtype = dtype_of(call)

    def vecdot(x: Tensor, y: Tensor, *, dim: int) -> Tensor:
        return (x.to(_in(x.dtype, wide(dtype))).conj() * y).sum(dim).to(dtype)

    return Composite(vecdot)


def cosine_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`cosine_similarity` along a cut dim that is longer than what blocks tell of theirs: two norms
    and a sum of products, and their gradients."""
    ndim, dtype = max(layout.ndim for layout in layouts), dtype_of(call)
    if not ndim or any(0 in one.shape for one in call.tensors):
        return None
    behind = call.args[2] % ndim - ndim
    num = max(one.num_shards(behind % one.ndim) for one in layouts if one.ndim >= -behind)
    length = max(one.shape[behind] for one in layouts if one.ndim >= -behind)
    if num == 1 or length <= 4 * num:
        return None

    def cosine(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
        both = [one.to(wide(dtype)) for one in torch.broadcast_tensors(x, y)]
        norms = [torch.linalg.vector_norm(one, 2, behind, True) for one in both]
        least = [one.detach().clamp_min(eps) for one in norms]
        x, y = (one / size for one, size in zip(both, least))
        out = (x * y).sum(behind)
        # Each norm by itself is 1 here, but for its gradient: of few numbers, not of all elements.
        # Of `eps`, where that is more, torch's gradient knows nothing.
        for norm, size in zip(norms, least):
            out = out * (size / (norm + (size - norm.detach()))).squeeze(behind)
        return out.to(dtype)

    return Composite(cosine)


def renorm_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`renorm(x, p, dim, maxnorm)`: slices along `dim` shrink to the norm."""
    dim = call.args[2] % layouts[0].ndim
    others = tuple(at for at in range(layouts[0].ndim) if at != dim)

    def renorm(x: Tensor, p: float, _: int, maxnorm: float) -> Tensor:
        work = _in(x.dtype, wide(x.dtype.to_real()))
        norms = torch.linalg.vector_norm(x.to(work), p, others, True)
        shrunk = torch.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1.0)
        return x * shrunk.to(x.dtype)

    return Composite(renorm)


def nanmean_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """nanmean over cut dims: the sum of the numbers by how many there are."""
    layout = layouts[0]
    dims, keepdim = reduced(layout, call.args[1]), bool(call.args[2])
    if not is_cut(layout, dims):
        return None
    dtype = dtype_of(call)

    def nanmean(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        count = x.isnan().logical_not().sum(dims, keepdim)
        total = x.nansum(dims, keepdim, dtype=wide(dtype))
        return (total / count).to(dtype)

    return Composite(nanmean)
