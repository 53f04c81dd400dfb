"""Reads by index: index, index_select, gather, take, take_along_dim, embedding.

Named elements move from the ranks that hold them (`row_exchange`) to the ranks that hold their
positions in the result (`index_layouts`), and gradients return the same way. Nothing else of the
tensor is sent. Where indices name so many elements that gathering the tensor is cheaper, the rule
applies. For a table, and for few elements, each rank contributes its own elements and zeros for the
rest, so the result is partial and only indices are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft import propagate
from weft.comm import BoundMesh
from weft.core import Layout
from weft.core.dtypes import itemsize
from weft.ops.algorithm import Algorithm, Local, received, replicated
from weft.ops.idle import unless_idle
from weft.ops.indexing.index_layouts import index_layout
from weft.ops.indexing.row_exchange import Units, from_front, outside
from weft.ops.indexing.rows import (
    as_rows,
    element_layouts,
    element_router,
    matching,
    named_dims,
    reads_nothing,
    router,
    to_place,
    unraveled,
)
from weft.ops.sorting import unsigned
from weft.rules import Call, Decision, op, page, rule
from weft.transport import Shards

__all__ = ["PAGE", "own_rows"]


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in ("bool", "uint8")


def _index_rule(call: Call, wants_grad: Sequence[bool]) -> str | None:
    """`x[i, :, j]`: indexed dims are whole. The dims of the indices broadcast; in the result they
    take the position of the indices, or come first if the indices are apart. With a mask the size
    depends on data."""
    ndim, indices = len(call.tensors[0].shape), call.args[1]
    if any(map(_is_mask, indices)):
        return None
    named, first = named_dims(indices)
    new = [f"i{at}" for at in range(len(call.results[0].shape) - ndim + len(named))]
    kept = [f"d{dim}" for dim in range(ndim) if dim not in named]
    x = [f"d{dim}!" if dim in named else f"d{dim}" for dim in range(ndim)]
    operands = [x, *(new[len(new) - len(indices[dim].shape) :] for dim in named)]
    result = " ".join([*kept[:first], *new, *kept[first:]])
    return f"{', '.join(map(' '.join, operands))} -> {result}"


def _index(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`x[i, :, j]` by integers: named elements are sent from the rank that holds them to their
    position in the result."""
    indices = list(call.args[1])
    if any(map(_is_mask, indices)) or reads_nothing(call, layouts[0], indices):
        return None
    dims, first = named_dims(indices)
    num_new = len(call.results[0].shape) - (layouts[0].ndim - len(dims))
    return _read(call, layouts, dims, call.results[0].shape[first : first + num_new], first, True)


def _index_select(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`index_select(x, dim, index)`: only the named slices are sent."""
    x, index = layouts
    if call.tensors[1].dtype not in ("int32", "int64"):  # its meta kernel takes it
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")
    if not x.ndim or not index.ndim:
        return None
    dim = call.args[1] % x.ndim
    return _read(call, layouts, (dim,), index.shape, dim, False)


def _read(
    call: Call, layouts: Sequence[Layout], dims: tuple[int, ...], shape: Sequence[int],
    first: int, wraps: bool,
) -> Algorithm | None:
    x, *indices = layouts
    cutting = [axis for dim in dims for axis in x.dims[dim]]
    if not cutting:
        return None
    if math.prod(shape) == 1:
        return _read_one(layouts, dims, shape, first, wraps)
    beside = _beside(x, dims, shape, indices)
    named, shape = (*dims, *beside), (*shape, *(x.shape[dim] for dim in beside))
    ones = Layout.replicated(x.mesh, [1 for _ in beside])
    places = index_layout(
        x, named, shape, [one.insert(one.ndim, ones) for one in indices], x.free_axes)
    kept = [dim for dim in range(x.ndim) if dim not in named]
    result = x.take(kept).insert(first, places.parted)
    if _whole_is_cheaper(x, named, result):
        return None
    shared = places.shared.take(range(len(shape) - len(beside)))
    operands = (x, *(shared.fitted(index.shape) for index in indices))

    def bind(mesh: BoundMesh) -> Callable[..., Tensor]:
        assert mesh.here is not None
        route = router(mesh, call.op, x, named, dims, places, wraps)
        mine = places.parted.local_shape_at(mesh.here)
        lines = [torch.arange(x.shape[dim], device=mesh.device) for dim in beside]

        def local(block: Tensor, *indices: Tensor) -> Tensor:
            routes = route([*(index[..., None] for index in indices), *lines] if lines else indices)
            rows, rest = as_rows(block, named)
            return to_place(routes.fetch(rows).view(*mine, *rest), len(mine), first)

        return local

    return Local(Decision(operands, (result,)), bind, communicates=tuple(cutting))


def _beside(
    x: Layout, dims: tuple[int, ...], shape: Sequence[int], indices: Sequence[Layout]
) -> tuple[int, ...]:
    """The next dim, if there are fewer positions than ranks to hold them. It is then named as well,
    index by index, and sharded, so every rank has a part of each slice."""
    cutting = {axis for dim in dims for axis in x.dims[dim]}
    count = math.prod(x.mesh.axis_sizes[axis] for axis in cutting)
    next_ = dims[-1] + 1
    fits = dims == tuple(range(dims[0], next_)) and next_ < x.ndim and (
        max(shape) < count <= x.shape[next_] and not x.dims[next_]
    )
    held = {axis for one in indices for axis in one.sharded_axes}
    return (next_,) if fits and cutting.isdisjoint(held) else ()


def _whole_is_cheaper(x: Layout, dims: Sequence[int], result: Layout) -> bool:
    """Whether a rank would fetch more elements by index than the tensor has."""
    whole = math.prod(x.shape) / math.prod(
        [x.num_shards(dim) for dim in range(x.ndim) if dim not in dims])
    return whole < math.prod(result.shape) / math.prod(map(result.num_shards, range(result.ndim)))


def _read_one(
    layouts: Sequence[Layout], dims: tuple[int, ...], shape: Sequence[int], first: int, wraps: bool
) -> Local:
    """One row: the rank that holds it gives it, the others give zeros."""
    x, *indices = layouts
    if not set(x.partial) <= {None, "sum"}:
        x = x.without_partial()
    kept = [dim for dim in range(x.ndim) if dim not in dims]
    result = x.take(kept).insert(first, Layout.replicated(x.mesh, shape))
    result = result.with_partial(axis for dim in dims for axis in x.dims[dim])
    operands = (x, *(Layout.replicated(x.mesh, index.shape) for index in indices))
    lengths = [x.shape[dim] for dim in dims]

    def bind(mesh: BoundMesh) -> Callable[..., Tensor]:
        units = Units(mesh, x, dims)

        def local(block: Tensor, *indices: Tensor) -> Tensor:
            wrong = outside(indices, lengths, wraps)
            if wrong:
                raise IndexError(wrong)
            rows, rest = as_rows(block, dims)
            one = [index.reshape(1) for index in from_front(indices, lengths, block.device)]
            holder, row = units.locate(one)
            mine = holder == units.comm.index
            if rows.shape[0]:
                found = rows.index_select(0, torch.where(mine, row, 0))
                found = found.masked_fill(~mine.view(1, *(1 for _ in rest)), 0)
            else:
                found = rows.sum(0, keepdim=True, dtype=rows.dtype)
            return to_place(found.view(*shape, *rest), len(shape), first)

        return local

    return Local(Decision(operands, (result,)), bind)


_ELEMENTS = rule(matching(1), linear=[0], moves=True)


def _gather(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`gather(x, dim, index)` along a sharded dim; the other dims of both are sharded alike."""
    x, index = layouts
    if not x.ndim or x.ndim != index.ndim:
        return None
    dim = call.args[1] % x.ndim
    cutting = x.dims[dim]
    if not cutting:
        return None
    count = math.prod(x.mesh.axis_sizes[axis] for axis in cutting)
    if count == 1 or index.shape[dim] < count:  # partial values take no more bytes
        return None if x.is_partial else _gather_few(x, index, dim)
    x, places = element_layouts(x, index.shape, dim, [index], [index], x.free_axes)
    result = places.parted.replace(partial=x.partial)
    decision = Decision((x, places.shared.fitted(index.shape)), (result,))
    if _whole_is_cheaper(x, range(x.ndim), result) or _moves_less(
        call, layouts, wants_grad, decision
    ):
        return None

    def bind(mesh: BoundMesh) -> Callable[..., Tensor]:
        assert mesh.here is not None
        route = element_router(mesh, call.op, x, dim, places)
        mine = places.parted.local_shape_at(mesh.here)
        return lambda block, index: route([index]).fetch(block.reshape(-1)).view(mine)

    return Local(decision, bind, communicates=tuple(cutting))


def _moves_less(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool], decision: Decision
) -> bool:
    """Whether the rule, by which the tensor may come to the ranks of the indices, takes fewer bytes
    than to bring indices to the tensor and elements back."""
    bound = _ELEMENTS.bind(call, wants_grad)
    if bound is None or decision.operands[1] == layouts[1]:
        return False
    result, back = decision.results[0], 2 if wants_grad[0] else 1
    copies = result.mesh.size() // math.prod(map(result.num_shards, range(result.ndim)))
    fetched = math.prod(result.shape) * copies
    elsewhere = propagate.decide(bound, call, layouts, wants_grad)
    return received(call, layouts, elsewhere, wants_grad) < received(
        call, layouts, decision, wants_grad
    ) + fetched * itemsize(call.tensors[0].dtype) * back


def _gather_few(source: Layout, index: Layout, dim: int) -> Local:
    """The rank that holds an element gives it, the others give zeros."""
    named = source.gathered((dim,)).fitted(index.shape)
    source = source.gathered(
        at for at, length in enumerate(source.shape) if at != dim and length != index.shape[at]
    )

    def bind(bound: BoundMesh) -> Callable[..., Tensor]:
        assert bound.here is not None
        start, stop = source.interval(dim, source.shard_index(dim, bound.here))

        def local(x: Tensor, wanted: Tensor) -> Tensor:
            own, inside = own_rows(wanted, start, stop, source.shape[dim])
            if start == stop:
                empty = x.sum(dim, keepdim=True, dtype=x.dtype)
                around = [slice(None if at == dim else n) for at, n in enumerate(wanted.shape)]
                return empty[tuple(around)].expand(wanted.shape)
            return torch.gather(x, dim, own).masked_fill(~inside, 0)

        return local

    return Local(Decision((source, named), (named.with_partial(source.dims[dim]),)), bind)


def own_rows(indices: Tensor, start: int, stop: int, length: int) -> tuple[Any, Any]:
    """Indices relative to this shard, clamped into it, and which of them lie in it."""
    if indices.device.type == "cpu" and indices.numel():
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= length:
            raise IndexError(f"index out of range: {low if low < 0 else high} is not in "
                             f"[0, {length})")
    inside = (indices >= start) & (indices < stop)
    return (indices - start).clamp(0, max(stop - start - 1, 0)), inside


def _gather_lines(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """A gather with a number as one operand, which torch takes as a 1-D tensor of one element."""
    return x.reshape(-1).gather(0, index.reshape(-1)).reshape(index.shape)


def _take_rule(call: Call, wants_grad: Sequence[bool]) -> str | None:
    """Nothing can be taken from a tensor without elements."""
    x = call.tensors[0].shape
    return f"{' '.join([f'x{dim}!' for dim in range(len(x))])}, ... -> ..." if 0 in x else None


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Elements at positions in the flattened tensor, by `index`."""
    x = x if x.dim() else x.reshape(1)
    return x[unraveled(index, x.shape)]


_OUTSIDE = 2**62
"""A position outside of every tensor."""


def _take_along_dim(x: Tensor, index: Tensor, dim: int | None = None) -> Tensor:
    """A gather of both operands, broadcast in the other dims; negative positions count from the
    end."""
    x = x if x.dim() else x.reshape(1)
    if dim is None:  # without a dim torch accepts no negative positions
        return x[unraveled(torch.where(index < 0, _OUTSIDE, index).reshape(-1), x.shape)]
    dim = dim % x.dim()
    index = index.remainder(x.shape[dim])
    if all(x.shape[at] == 1 for at in range(x.dim()) if at != dim):  # one row, read by all
        return x.reshape(-1)[index]
    around = [torch.broadcast_shapes((1 if at == dim else a,), (1 if at == dim else b,))[0]
               for at, (a, b) in enumerate(zip(x.shape, index.shape))]
    x, index = (
        one.expand([one.shape[at] if at == dim else length for at, length in enumerate(around)])
        for one in (x, index)
    )
    return x.gather(dim, index)


# Tables.


def _embedding_rule(call: Call, wants_grad: Sequence[bool]) -> str | None:
    """Rows of a table: a sharded row is found on the rank that holds it. Frequencies that scale the
    gradient are counted over all indices."""
    if call.get("sparse"):
        return None
    return "v! e, ...! -> ... e" if call.get("scale_grad_by_freq") else "v~:sum e, ... -> ... e"


def _embedding(
    shards: Shards, weight: Tensor, indices: Tensor, padding_idx: int = -1,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:
    """The rows that this shard holds, and zeros for the others."""
    start, num = shards.starts[0], len(weight)
    own, inside = own_rows(indices, start, start + num, shards.layout.shape[0])
    if not num or not own.numel():
        return _no_row(weight, indices)
    padding = padding_idx - start if start <= padding_idx < start + num else -1
    return torch.embedding(weight, own, padding).masked_fill(~inside.unsqueeze(-1), 0)


def _no_row(weight: Tensor, indices: Tensor) -> Tensor:
    """Zeros for all indices, with an edge to the table. torch's embedding has no second derivative
    where there are no indices."""
    return weight[:0].sum(0, dtype=weight.dtype).expand(*indices.shape, -1)


def _embedding_renorm(weight: Tensor, indices: Tensor, most: float, norm_type: float) -> Tensor:
    """A flag per row says whether it is named, a factor per row how far it shrinks."""
    named = weight.new_zeros(weight.shape[0], dtype=torch.bool)
    named = named.index_fill(0, indices.reshape(-1), True).unsqueeze(-1)
    norms = torch.linalg.vector_norm(weight, norm_type, 1, True)
    return weight * torch.where(named & (norms > most), most / (norms + 1e-7), 1.0)


def _repeats(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local | Decision:
    """`repeat_interleave(repeats)` with a known total: all ranks know the repeats, and
    each names its own part of the positions."""
    repeats = layouts[0]
    if not repeats.dims[0]:
        return replicated(call, layouts)
    result = Layout.make(repeats.mesh, call.results[0].shape, repeats.dims)
    total = result.shape[0]

    def bind(bound: BoundMesh) -> Callable[..., Tensor]:
        assert bound.here is not None
        ((start, stop),) = result.box_at(bound.here)
        return lambda counts: torch.repeat_interleave(counts, output_size=total)[start:stop].clone()

    return Local(Decision((Layout.replicated(repeats.mesh, repeats.shape),), (result,)), bind)


def _places_of(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """The places of as many as the repeats add up to, which is read."""
    if output_size is not None:
        return NotImplemented
    total, wrong = map(int, torch.stack((repeats.sum(), repeats.lt(0).sum())).tolist())
    if wrong:  # told the total, torch's kernel believes it
        raise RuntimeError("repeats can not be negative")
    return torch.repeat_interleave(repeats, output_size=total)


def _repeat_interleave(
    x: Tensor, repeats: Tensor, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """A read by index, of the places that the repeats name: their number is read."""
    if dim is None:
        x, dim = x.reshape(-1), 0
    length = x.shape[dim]
    repeats = repeats.detach()
    repeats = repeats.expand(length) if repeats.numel() == 1 else repeats
    if repeats.shape != (length,):
        raise RuntimeError("repeats must have the same size as input along dim, but got "
                           f"repeats.size(0) = {len(repeats)} and input.size({dim}) = {length}")
    return x.index_select(dim, torch.repeat_interleave(repeats, output_size=output_size))


def _by_masks(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """What masks select, whose number is read."""
    return x[tuple([slice(None) if one is None else one for one in indices])]


PAGE = page(
    op("index", rule(_index_rule, linear=[0], moves=True), layouts=unsigned.by_bits(_index),
       compose=_by_masks),
    op("index_select", rule("... s!, i -> ... i", along="dim", linear=[0], moves=True),
       layouts=_index_select),
    op("gather", _ELEMENTS, layouts=_gather, compose=_gather_lines),
    op("take", rule(_take_rule), compose=_take),
    op("take_along_dim", compose=_take_along_dim),
    op("embedding", rule(_embedding_rule, linear=[0], moves=True, on_box=unless_idle),
       kernel=_embedding),
    op("embedding_renorm", compose=_embedding_renorm),
    op("repeat_interleave.Tensor", layouts=_repeats, compose=_places_of),
    op("repeat_interleave.self_Tensor", compose=_repeat_interleave),
)
