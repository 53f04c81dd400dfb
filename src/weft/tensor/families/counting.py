"""Calls whose result has a length, or bins, that depend on the data: `unique`,
`unique_consecutive`, `bincount`, `histogram`, `histogramdd`. Each call exchanges the data that it
needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from weft.core import Layout
from weft.core.cuts import cuts_from_sizes
from weft.ops.sorting.distinct import Distinct, consecutive, distinct, distinct_rows
from weft.ops.sorting.splitting import BlockGroup, can_key
from weft.ops.sorting.unsigned import from_order, to_order
from weft.rules import op, page
from weft.tensor import modes
from weft.tensor.call.dispatch import mesh_of
from weft.tensor.call.fallback import runner
from weft.tensor.meta import contiguous_strides, replicated_meta
from weft.tensor.placing.layouts import as_sharded, local_to_sharded
from weft.tensor.placing.operands import entered
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.trace.trees import map_tensors
from weft.transport import Shards, traffic
from weft.transport.nodes import with_gradient

__all__ = ["PAGE"]

_types: Any = torch.return_types


def _unique(
    input: ShardTensor, sorted: bool = True, return_inverse: bool = False,
    return_counts: bool = False, dim: int | None = None,
) -> Any:
    """The distinct elements, in ragged parts where the tensor is sharded."""
    return _distinct(torch.unique, distinct, input, dim, return_inverse, return_counts,
                     sorted=sorted)


def _unique_consecutive(
    input: ShardTensor, return_inverse: bool = False, return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """The first of equal neighbours, in ragged parts where the tensor is sharded."""
    return _distinct(
        torch.unique_consecutive, consecutive, input, dim, return_inverse, return_counts)


def _distinct(
    func: Any, find: Callable[..., Distinct], x: ShardTensor, dim: int | None, inverse: bool,
    counts: bool, **more: bool,
) -> Any:
    mesh, layout = x._meta.mesh, x.sharding.without_partial()
    if dim is not None and x.dim():
        torch.empty(x.shape, device="meta").size(dim)  # torch's error of a dim that there is not
    name, in_order = func.__name__, find is consecutive
    options = {"return_inverse": inverse, "return_counts": counts, "dim": dim, **more}
    if mesh.here is None:
        return runner(mesh, "the length of its result depends on the data")(func, (x,), options)
    if not any(layout.dims):
        (whole,) = entered(name, mesh, (x,), (layout,), _REDUCED)
        out = func(whole, **options)
        return map_tensors(lambda one: wrap(one, replicated_meta(mesh, one)), out)
    over = None if dim is None or x.dim() < 2 else dim % x.dim()
    if (over is not None and 0 in layout.shape) or not can_key(str(x.dtype)[6:]):
        return runner(mesh, _COMPARED)(func, (x,), options)
    if over is not None or in_order:  # rows, or the order of all, along one dim
        layout = _along(layout, over or 0)
    modes.check_summaries(name, (layout,), layout.sharded_axes)
    local = to_order(entered(name, mesh, (x.detach(),), (layout,), _REDUCED)[0])
    with traffic.label(name, "what is distinct among all blocks"):
        group = BlockGroup(Shards(mesh, layout, range(layout.ndim)))
        if over is None:
            found = find(group, local.flatten(), inverse, counts)
        elif not in_order and x.is_floating_point() and any(group.tell(bool(local.isnan().any()))):
            return runner(mesh, "NaN has no place in the order of rows")(func, (x,), options)
        else:
            found = _of_rows(find, group, local, over, inverse, counts)
    lead = range(layout.ndim) if over is None else (over,)
    axes = tuple(axis for at in lead for axis in layout.dims[at])
    cuts = cuts_from_sizes(found.sizes)
    ragged = Layout.make(layout.mesh, (cuts[-1],), (axes,), (cuts,))
    values, lies = from_order(found.values, x.dtype), ragged
    if over is not None:
        lies = layout.recut(over, cuts[-1], cuts)
    if x.requires_grad and torch.is_grad_enabled():
        values = _underivable(values, x._local, name)
    strides = None if over is None else _in_front(lies.shape, over)
    out = [local_to_sharded(values, mesh, lies, strides)]
    if inverse and found.inverse is not None:
        places = found.inverse if over is not None else found.inverse.view(local.shape)
        of_places = layout if over is None else layout.take((over,))
        out.append(local_to_sharded(places, mesh, of_places))
    if counts and found.counts is not None:
        out.append(local_to_sharded(found.counts, mesh, ragged))
    return out[0] if len(out) == 1 else tuple(out)


def _in_front(shape: Sequence[int], dim: int) -> tuple[int, ...] | None:
    """The strides of a tensor of this shape that was contiguous with one dim in front."""
    if not dim:
        return None
    found = list(contiguous_strides((shape[dim], *shape[:dim], *shape[dim + 1 :])))
    return (*found[1 : dim + 1], found[0], *found[dim + 1 :])


_COMPARED = "elements without an order are compared"
_REDUCED = "every axis is reduced"


def _along(layout: Layout, dim: int) -> Layout:
    """The layout with one dim cut, by all axes that cut any."""
    others = [axis for at, axes in enumerate(layout.dims) if at != dim for axis in axes]
    if not others:
        return layout
    dims: list[Any] = [()] * layout.ndim
    dims[dim] = (*layout.dims[dim], *others)
    return Layout.make(layout.mesh, layout.shape, dims)


def _of_rows(
    find: Callable[..., Distinct], group: BlockGroup, local: torch.Tensor, dim: int, numbers: bool,
    counts: bool,
) -> Distinct:
    """What is distinct along a dim, of which each place is a row; results have the dims of x."""
    front = local.movedim(dim, 0)
    rows = front.reshape(len(front), math.prod(front.shape[1:]))
    if rows.dtype is torch.bool:
        rows = rows.to(torch.uint8)
    found = (distinct_rows if find is distinct else find)(group, rows, numbers, counts)
    values = found.values.to(local.dtype).view(-1, *front.shape[1:]).movedim(0, dim)
    return replace(found, values=values)


def _underivable(value: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
    """A result that requires a gradient, as x does, of which there is none."""
    def refuse(grad: torch.Tensor) -> NoReturn:
        raise NotImplementedError(f"the derivative for '{name}' is not implemented.")

    return with_gradient(x, lambda _: value.detach(), refuse)


def _ends(x: torch.Tensor) -> tuple[Any, Any]:
    """The least and the largest element, as numbers."""
    low, high = torch.aminmax(x.detach())
    return low.item(), high.item()


def _bincount(input: torch.Tensor, weights: Any = None, minlength: int = 0) -> ShardTensor:
    """How often each number occurs: every rank counts its own, the sum stays partial."""
    metas = [one._meta for one in (input, weights) if type(one) is ShardTensor]
    mesh = mesh_of("bincount", metas)
    if minlength < 0:
        raise RuntimeError("minlength should be >= 0")
    low, high = _ends(input) if input.numel() else (0, -1)
    if input.dim() != 1 or low < 0 or input.dtype.is_floating_point:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if weights is not None and weights.shape != input.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    like = next(meta.layout for meta in metas)
    layout = like.without_partial()
    given = [one.detach() for one in (input, weights) if one is not None]
    local, *factors = entered("bincount", mesh, given, [layout] * len(given), _REDUCED)
    counts = torch.bincount(local, *factors, minlength=max(high + 1, minlength))
    if factors and input.numel():  # of no elements, torch gives integers
        counts = counts.to(torch.float32 if factors[0].dtype is torch.float32 else torch.float64)
    counted = counts.shape
    if mesh.here is None:
        counts = counts[:0]
    terms = Layout.replicated(layout.mesh, counted).with_partial(layout.dims[0])
    return local_to_sharded(counts, mesh, terms)


def _histogram(
    input: torch.Tensor, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False,
) -> Any:
    """Every rank counts its own; without borders or a range, between those of the data."""
    if isinstance(bins, torch.Tensor):
        options = {}
    else:
        given = range is not None or not input.numel()
        options = {"range": range if given else _ends(input)}
    mesh, counts, borders = _counted("histogram", torch.histogram, input, bins, weight, options)
    counts = counts / counts.sum() / borders.diff() if density else counts
    return _types.histogram((counts, as_sharded(borders, mesh)))


def _histogramdd(
    input: torch.Tensor, bins: Any, range: Any = None, weight: Any = None, density: bool = False
) -> Any:
    """Every rank counts its own rows; boxes lie between borders, of the data if none are given."""
    rows = input.reshape(-1, input.shape[-1])
    weight = None if weight is None else weight.reshape(-1)
    if not isinstance(bins, int) and isinstance(bins[0], torch.Tensor):
        options = {}
    else:
        if range is None and rows.shape[0]:
            low, high = rows.detach().aminmax(dim=0)
            range = [end for pair in zip(low.tolist(), high.tolist()) for end in pair]
        options = {"range": range}
    mesh, counts, borders = _counted("histogramdd", torch.histogramdd, rows, bins, weight, options)
    if density:
        counts = counts / counts.sum()
        for dim, line in enumerate(borders):
            counts = counts / line.diff().view(-1, *[1] * (len(borders) - 1 - dim))
    return _types.histogramdd((counts, tuple([as_sharded(line, mesh) for line in borders])))


def _counted(
    name: str, func: Any, x: torch.Tensor, bins: Any, weight: Any, options: dict[str, Any]
) -> tuple[Any, ShardTensor, Any]:
    """The mesh; the counts of `func` on every rank's own rows, as partial values; and the
    borders."""
    given = [x, weight, *([bins] if isinstance(bins, torch.Tensor | int) else bins)]
    metas = [one._meta for one in given if type(one) is ShardTensor]
    mesh = mesh_of(name, metas)
    layout = metas[0].layout.without_partial()
    if layout.shape != x.shape:  # a weight of rows, or borders
        layout = Layout.replicated(layout.mesh, x.shape)
    bins = map_tensors(lambda x: x.full_tensor() if type(x) is ShardTensor else x, bins)
    if func is torch.histogramdd:
        layout = layout.gathered((1,))
    like = layout if weight is None or weight.shape == x.shape else layout.take((0,))
    (local,) = entered(name, mesh, (x.detach(),), (layout,), _REDUCED)
    if weight is not None:
        (mine,) = entered(name, mesh, (weight.detach(),), (like,), _REDUCED)
        options = {**options, "weight": mine}
    if mesh.here is None:
        local = local.new_zeros(0, *layout.shape[1:])
        options.pop("weight", None)
    counts, borders = func(local, bins, **options)
    terms = Layout.replicated(layout.mesh, counts.shape).with_partial(layout.sharded_axes)
    counts = counts if mesh.here is not None else counts.flatten()[:0]
    return mesh, local_to_sharded(counts, mesh, terms), borders


PAGE = page(
    op("torch.unique torch.Tensor.unique", compose=_unique, each_call=True),
    op("torch.unique_consecutive torch.Tensor.unique_consecutive", compose=_unique_consecutive,
       each_call=True),
    op("bincount", compose=_bincount, each_call=True),
    op("histogram", compose=_histogram, each_call=True),
    op("histogramdd", compose=_histogramdd, each_call=True),
)
