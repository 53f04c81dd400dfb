"""Reads by index along cut dims: `x[i, j]`, index_select, gather, take, take_along_dim.

What is read comes from the ranks that hold it (`routes`), to where its place in the result lies
(`named`), and its gradient goes back the same way. Nothing else of the tensor travels. Where
indices name so much more than there is that fetching the tensor costs less, the rule serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Local
from weft.ops.indexing import pick
from weft.ops.indexing.named import Places, asker_of, fitted, places_of, unused
from weft.ops.indexing.routes import (
    Post,
    Routes,
    Units,
    ask,
    from_front,
    out_of_bounds,
    outside,
    share,
)
from weft.rules import Call, Decision

__all__ = [
    "as_rows", "element_places", "element_router", "gather_lookup", "grid", "index_lookup",
    "index_select_lookup", "joined", "named_dims", "reads_nothing", "router",
    "take_along_dim_lookup", "take_lookup", "to_place", "unraveled",
]

Router = Callable[[Sequence[Tensor]], Routes]


def named_dims(indices: Sequence[Any], num_new: int) -> tuple[tuple[int, ...], int]:
    """The dims that `x[indices]` names, and where the new dims stand in the result."""
    dims = tuple(dim for dim, index in enumerate(indices) if index is not None)
    kept_before = dims[0] if dims == tuple(range(dims[0], dims[0] + len(dims))) else 0
    return dims, kept_before


def index_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`x[i, :, j]` by integers: what is named travels, from the rank that holds it to its place."""
    indices = list(call.args[1])
    named = [index for index in indices if index is not None]
    if not named or any(index.dtype in ("bool", "uint8") for index in named):
        return None
    if reads_nothing(call, layouts[0], indices):
        return None
    num_new = len(call.results[0].shape) - (layouts[0].ndim - len(named))
    dims, first = named_dims(indices, num_new)
    return _read(call, layouts, dims, call.results[0].shape[first : first + num_new], first, True)


def reads_nothing(call: Call, x: Layout, indices: Sequence[Any]) -> bool:
    """Whether no element is read or written: then torch does not look whether the indices lie
    inside, as long as there is something to lie in."""
    return 0 in call.results[0].shape and all(
        x.shape[dim] for dim, index in enumerate(indices) if index is not None
    )


def index_select_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`index_select(x, dim, index)`: the slices that are named travel, and nothing else."""
    x, index = layouts
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
        return _as_terms(call, layouts, dims, shape, first, wraps)
    beside = _beside(x, dims, shape, indices)
    named, shape = (*dims, *beside), (*shape, *(x.shape[dim] for dim in beside))
    spread = [
        ((*one.shape, *[1 for _ in beside]), (*one.dims, *[() for _ in beside]),
         (*one.cuts, *[None for _ in beside])) for one in indices
    ]
    places = places_of(x, named, shape, spread, unused(x))
    kept = [dim for dim in range(x.ndim) if dim not in named]
    result = joined(x, kept, places.parted, first, x.partial)
    if _whole_is_cheaper(x, named, result, cutting):
        return None
    around = range(len(shape) - len(beside))
    shared = Layout.make(
        x.mesh, shape[: len(around)], [places.shared.dims[dim] for dim in around],
        [places.shared.cuts[dim] for dim in around],
    )
    operands = (x, *(fitted(index, shared) for index in indices))
    lengths = [*(x.shape[dim] for dim in dims), *(None for _ in beside)]

    def bind(mesh: BoundMesh) -> Callable[..., Tensor]:
        assert mesh.here is not None
        route = router(mesh, call.op, x, named, dims, places, lengths, wraps)
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
    """The next dim, if there are fewer places than ranks to hold them: named as well, place by
    place, it is cut, and every rank has a part of each."""
    cutting = {axis for dim in dims for axis in x.dims[dim]}
    count = math.prod(x.mesh.axis_sizes[axis] for axis in cutting)
    next_ = dims[-1] + 1
    fits = dims == tuple(range(dims[0], next_)) and next_ < x.ndim and (
        max(shape) < count <= x.shape[next_] and not x.dims[next_]
    )
    held = {axis for one in indices for axis in one.sharded_axes}
    return (next_,) if fits and cutting.isdisjoint(held) else ()


def router(
    mesh: BoundMesh, op: str, x: Layout, dims: Sequence[int], cut: Sequence[int], places: Places,
    lengths: Sequence[int | None], wraps: bool, once: bool = True,
) -> Router:
    """Makes routes from the indices into `dims` of x, of which those into `cut` are global.

    `lengths` are what indices are held against, where they are the user's; `wraps` says whether
    these may be negative. `once`: to fetch units, else to deliver them.
    """
    units = Units(mesh, x, dims, cut)
    post = Post(units.comm, op, units.names)
    asker = None if places.over is None else asker_of(mesh, places, units.axes)

    def route(indices: Sequence[Tensor]) -> Routes:
        wrong = outside(indices, lengths, wraps)
        if asker is not None and wrong:
            raise out_of_bounds(op)(wrong)
        if wrong:
            indices = [torch.zeros_like(index) for index in indices]
        spread = torch.broadcast_tensors(*from_front(indices, lengths, mesh.device))
        holder, row = units.locate(spread)
        if asker is None:
            return ask(post, holder, row, wrong, once)
        return share(post, holder, row, asker, once)

    return route


def joined(
    x: Layout, kept: Sequence[int], places: Layout, first: int, partial: Any
) -> Layout:
    """The layout of what has the kept dims of x, with places among them."""
    def parts(mine: Sequence[Any], new: Sequence[Any]) -> list[Any]:
        rest = [mine[dim] for dim in kept]
        return [*rest[:first], *new, *rest[first:]]

    return Layout.make(
        x.mesh, parts(x.shape, places.shape), parts(x.dims, places.dims),
        parts(x.cuts, places.cuts), partial,
    )


def as_rows(block: Tensor, dims: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
    """The block with the named dims as one, in front; and its other lengths."""
    front = block.movedim(tuple(dims), tuple(range(len(dims))))
    rest = front.shape[len(dims) :]
    return front.reshape(math.prod(front.shape[: len(dims)]), *rest), rest


def to_place(out: Tensor, num_new: int, first: int) -> Tensor:
    if not first:
        return out
    new = range(num_new)
    return out.movedim(tuple(new), tuple(first + dim for dim in new)).contiguous()


def _whole_is_cheaper(
    x: Layout, dims: Sequence[int], result: Layout, cutting: Sequence[int]
) -> bool:
    """Whether a rank would fetch more elements by index than the tensor has."""
    sizes = x.mesh.axis_sizes
    rest = math.prod(sizes[a] for d in range(x.ndim) if d not in dims for a in x.dims[d])
    whole = math.prod(x.shape) / rest
    return whole < math.prod(result.shape) / math.prod(sizes[a] for a in result.sharded_axes)


def _as_terms(
    call: Call, layouts: Sequence[Layout], dims: tuple[int, ...], shape: Sequence[int],
    first: int, wraps: bool,
) -> Local | None:
    """One unit: whoever holds it gives it, the others zeros."""
    x, *indices = layouts
    if not set(x.partial) <= {None, "sum"}:
        x = x.replace(partial=(None,) * x.mesh.ndim)
    partial = list(x.partial)
    for dim in dims:
        for axis in x.dims[dim]:
            partial[axis] = "sum"
    kept = [dim for dim in range(x.ndim) if dim not in dims]
    result = joined(x, kept, Layout.replicated(x.mesh, shape), first, partial)
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


def gather_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`gather(x, dim, index)` along a cut dim; the other dims of both are cut alike."""
    x, index = layouts
    if x.ndim != index.ndim and max(x.ndim, index.ndim) == 1:
        return Composite(_gather_lines)
    if not x.ndim or x.ndim != index.ndim:
        return None
    dim = call.args[1] % x.ndim
    cutting = x.dims[dim]
    if not cutting:
        return None
    count = math.prod(x.mesh.axis_sizes[axis] for axis in cutting)
    if count == 1 or index.shape[dim] < count:  # terms, of which a sum needs no more
        return pick.gather_lookup(call, layouts, wants_grad)
    x, places = element_places(x, index.shape, dim, [index], [index], unused(x))
    result = places.parted.replace(cuts=places.parted.cuts, partial=x.partial)
    if _whole_is_cheaper(x, range(x.ndim), result, cutting):
        return None
    operands = (x, fitted(index, places.shared))

    def bind(mesh: BoundMesh) -> Callable[..., Tensor]:
        assert mesh.here is not None
        route = element_router(mesh, call.op, x, dim, places)
        mine = places.parted.local_shape_at(mesh.here)
        return lambda block, index: route([index]).fetch(block.reshape(-1)).view(mine)

    return Local(Decision(operands, (result,)), bind, communicates=tuple(cutting))


def _gather_lines(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """A gather of which one operand is a number, which torch takes for a line of one element."""
    return x.reshape(-1).gather(0, index.reshape(-1)).reshape(index.shape)


def element_places(
    x: Layout, shape: Sequence[int], dim: int, operands: Sequence[Layout],
    together: Sequence[Layout], beside: Collection[int],
) -> tuple[Layout, Places]:
    """Layouts for single elements named along `dim`, by an index of this shape: as the operands
    lie in that dim, over the axes that cut it and those `beside`. Other dims are cut as those of x
    where all of `together` are as long as x, and are whole elsewhere."""
    alike = [
        at == dim or all(one.shape[at] == x.shape[at] for one in together)
        for at in range(x.ndim)
    ]
    x = x.replace(dims=[axes if alike[at] else () for at, axes in enumerate(x.dims)])
    spreads = [
        ([one.shape[dim]], [one.dims[dim]], [one.cuts[dim]]) for one in operands
    ]
    line = places_of(x, (dim,), shape[dim : dim + 1], spreads, beside)

    def full(one: Layout) -> Layout:
        return Layout.make(
            x.mesh, shape,
            [one.dims[0] if at == dim else x.dims[at] for at in range(x.ndim)],
            [one.cuts[0] if at == dim else x.cuts[at] for at in range(x.ndim)],
        )

    return x, Places(full(line.shared), full(line.parted), None if line.over is None else dim)


def element_router(
    mesh: BoundMesh, op: str, x: Layout, dim: int, places: Places, once: bool = True
) -> Router:
    """As `router`, for single elements: one index says their place along `dim`."""
    ndim = x.ndim
    lengths = [x.shape[at] if at == dim else None for at in range(ndim)]
    route = router(mesh, op, x, range(ndim), (dim,), places, lengths, False, once)

    def routed(indices: Sequence[Tensor]) -> Routes:
        (index,) = indices
        return route([
            index if at == dim else grid(index, at) for at in range(ndim)
        ])

    return routed


def grid(index: Tensor, dim: int) -> Tensor:
    """The place of each element of a tensor along one of its dims."""
    line = torch.arange(index.shape[dim], device=index.device)
    return line.view([-1 if at == dim else 1 for at in range(index.dim())]).expand(index.shape)


_OUTSIDE = 2**62
"""A place that no tensor has."""


def unraveled(index: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Places in a flattened tensor as one index for each of its dims; those outside of it lie
    outside of its first dim."""
    total = 1
    for length in shape:
        total = total * length
    index = torch.where(index < -total, total, torch.where(index < 0, index + total, index))
    found = []
    for length in reversed(shape[1:]):
        found.append(index % length)
        index = torch.div(index, length, rounding_mode="floor")
    return (index, *reversed(found))


def take_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`take(x, index)`: places in the flattened tensor."""
    return None if 0 in layouts[0].shape else Composite(_take)


def _take(x: Tensor, index: Tensor) -> Tensor:
    x = x if x.dim() else x.reshape(1)
    return x[unraveled(index, x.shape)]


def take_along_dim_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`take_along_dim(x, index, dim)`: a gather of both, broadcast beside it; places go round"""
    x, dim = layouts[0], call.args[2]
    if not x.ndim or (dim is not None and not x.shape[dim]):
        return None
    return Composite(_take_along_dim)


def _take_along_dim(x: Tensor, index: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:  # here torch takes no negative places
        return x[unraveled(torch.where(index < 0, _OUTSIDE, index).reshape(-1), x.shape)]
    dim = dim % x.dim()
    index = index.remainder(x.shape[dim])
    if all(x.shape[at] == 1 for at in range(x.dim()) if at != dim):  # one line, read by all
        return x.reshape(-1)[index]
    around = [torch.broadcast_shapes((1 if at == dim else a,), (1 if at == dim else b,))[0]
               for at, (a, b) in enumerate(zip(x.shape, index.shape))]
    x, index = (
        one.expand([one.shape[at] if at == dim else length for at, length in enumerate(around)])
        for one in (x, index)
    )
    return x.gather(dim, index)
