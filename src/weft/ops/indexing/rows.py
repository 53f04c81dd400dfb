"""Rows and elements that indices name: the requests, and the exchange that brings them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.indexing.index_layouts import IndexLayout, askers, index_layout
from weft.ops.indexing.row_exchange import (
    Routes,
    RowExchange,
    Units,
    from_front,
    out_of_bounds,
    outside,
    plan_by_request,
    plan_together,
)
from weft.ops.places import apart
from weft.rules import Call

__all__ = [
    "as_rows", "bounds", "element_layouts", "element_router", "grid", "known_rows", "matching",
    "named_along", "named_dims", "reads_nothing", "router", "to_place", "unraveled",
]

Router = Callable[[Sequence[Tensor]], Routes]


def named_dims(indices: Sequence[Any]) -> tuple[tuple[int, ...], int]:
    """The dims that `x[indices]` names, and the position of the new dims in the result."""
    dims = tuple(dim for dim, index in enumerate(indices) if index is not None)
    adjacent = dims and dims[-1] - dims[0] == len(dims) - 1
    return dims, dims[0] if adjacent else 0


def matching(result: int) -> Callable[[Call, Any], str | None]:
    """The rule of tensors whose elements correspond except along the dim that an index names. The
    result has the dims of operand `result`: an index (1), which may be sharded along that dim, or a
    target (0)."""
    def text(call: Call, wants_grad: Any) -> str | None:
        """Other dims pass where all operands have the same length."""
        shapes = [tensor.shape for tensor in call.tensors]
        ndim = len(shapes[0])
        if any(len(shape) != ndim for shape in shapes):
            return None  # an index without elements may have any shape
        named = call.args[1] % ndim if ndim else 0

        def word(operand: int, dim: int) -> str:
            if dim != named and len({shape[dim] for shape in shapes}) == 1:
                return f"d{dim}"
            passes = operand == result == 1 and dim == named
            return f"{'xis'[operand]}{dim}" + ("" if passes else "!")

        texts = [" ".join([word(at, dim) for dim in range(ndim)]) for at in range(len(shapes))]
        return f"{', '.join(texts)} -> {texts[result]}"

    return text


def reads_nothing(call: Call, x: Layout, indices: Sequence[Any]) -> bool:
    """Whether no element is read or written. torch then does not check the bounds of indices,
    unless the tensor has no elements."""
    return 0 in call.results[0].shape and all(
        x.shape[dim] for dim, index in enumerate(indices) if index is not None
    )


def router(
    mesh: BoundMesh, op: str, x: Layout, dims: Sequence[int], cut: Sequence[int],
    places: IndexLayout, wraps: bool, once: bool = True,
) -> Router:
    """Makes routes from the indices into `dims` of x, of which those into `cut` are global: they
    come from the user, and have bounds.

    `wraps` says whether they may be negative. `once`: to fetch units, else to deliver them.
    """
    lengths = bounds(x, dims, cut)
    units = Units(mesh, x, dims, cut)
    exchange = RowExchange(units.comm, op, units.names)
    asker = None if places.over is None else askers(mesh, places, units.axes)

    def route(indices: Sequence[Tensor]) -> Routes:
        wrong = outside(indices, lengths, wraps)
        if asker is not None and wrong:
            raise out_of_bounds(op)(wrong)
        if wrong:
            indices = [index.new_empty(0) for index in indices]  # the shards may have no row
        spread = torch.broadcast_tensors(*from_front(indices, lengths, mesh.device))
        holder, row = units.locate(spread)
        if asker is None:
            return plan_by_request(exchange, holder, row, wrong, once)
        return plan_together(exchange, holder, row, asker, once)

    return route


def bounds(x: Layout, dims: Sequence[int], cut: Sequence[int]) -> list[int | None]:
    """The bounds of the indices into `dims`, of which those into `cut` have some."""
    return [x.shape[dim] if dim in cut else None for dim in dims]


def known_rows(
    mesh: BoundMesh, x: Layout, dims: tuple[int, ...], parted: Layout, over: int,
    names: Sequence[Tensor], out: Layout,
) -> Callable[[Tensor], Tensor]:
    """From a block of x that of the result: the rows that `dims` name, at the places of `parted`,
    each fetched from the rank that holds it. All ranks know the names, so routes are made once."""
    assert mesh.here is not None
    units = Units(mesh, x, dims)
    places = IndexLayout(Layout.replicated(x.mesh, parted.shape), parted, over)
    holder, row = units.locate([one.to(mesh.device) for one in names])
    routes = plan_together(
        RowExchange(units.comm, "rows"), holder, row, askers(mesh, places, units.axes), once=True)
    given, mine = x.local_shape_at(mesh.here), parted.local_shape_at(mesh.here)
    made = out.local_shape_at(mesh.here)

    def local(block: Tensor) -> Tensor:
        rows, others = as_rows(block.reshape(given), dims)
        fetched = routes.fetch(rows).view(*mine, *others)
        return to_place(fetched, len(mine), dims[0]).reshape(made)

    return local


def as_rows(block: Tensor, dims: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
    """The block with the named dims joined into one leading dim, and its other lengths."""
    front = block.movedim(tuple(dims), tuple(range(len(dims))))
    rest = front.shape[len(dims) :]
    return front.reshape(math.prod(front.shape[: len(dims)]), *rest), rest


def to_place(out: Tensor, num_new: int, first: int) -> Tensor:
    if not first:
        return out
    new = range(num_new)
    return out.movedim(tuple(new), tuple(first + dim for dim in new)).contiguous()


def element_layouts(
    x: Layout, shape: Sequence[int], dim: int, operands: Sequence[Layout],
    together: Sequence[Layout], beside: Collection[int],
) -> tuple[Layout, IndexLayout]:
    """Layouts for single elements named along `dim` by an index of this shape. That dim has the
    layout of the operands, over the axes that shard it and those in `beside`. Other dims are
    sharded like those of x where all of `together` are as long as x, and whole elsewhere."""
    others = [at for at in range(x.ndim) if at != dim]
    x = x.gathered(
        at for at in others if any(one.shape[at] != x.shape[at] for one in together)
    )
    lines = [one.take([dim]) for one in operands]
    line = index_layout(x, (dim,), shape[dim : dim + 1], lines, beside)
    around = x.take(others).without_partial().replace(shape=[shape[at] for at in others])
    shared, parted = (around.insert(dim, one) for one in (line.shared, line.parted))
    return x, IndexLayout(shared, parted, None if line.over is None else dim)


def element_router(
    mesh: BoundMesh, op: str, x: Layout, dim: int, places: IndexLayout
) -> Router:
    """Like `router`, for single elements: one index gives their position along `dim`."""
    route = router(mesh, op, x, range(x.ndim), (dim,), places, False)
    return lambda indices: route(named_along(indices[0], dim))


def named_along(index: Tensor, dim: int) -> list[Tensor]:
    """Single elements named along a dim, as an index for each dim: in the others they are where
    their index is."""
    return [index if at == dim else grid(index, at) for at in range(index.dim())]


def grid(index: Tensor, dim: int) -> Tensor:
    """The position of each element of a tensor along one of its dims."""
    line = torch.arange(index.shape[dim], device=index.device)
    return line.view([-1 if at == dim else 1 for at in range(index.dim())]).expand(index.shape)


def unraveled(index: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Positions in a flattened tensor as one index per dim; a position outside of it is
    outside of its first dim."""
    total = 1
    for length in shape:
        total = total * length
    index = torch.where(index < -total, total, torch.where(index < 0, index + total, index))
    return tuple(apart(index, shape))
