"""flip, roll, repeat, diag_embed along cut dims: each shard gets what its place in it needs.

Where every element comes from is known without data, so routes are made once, with the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Local
from weft.ops.indexing.named import Places, asker_of
from weft.ops.indexing.read import as_rows, to_place
from weft.ops.indexing.routes import Post, Units, share
from weft.rules import Call, Decision

__all__ = ["diag_embed_lookup", "flip_lookup", "repeat_lookup", "roll_lookup"]


def flip_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`flip(x, dims)`: dims that are whole turn where they lie."""
    x = layouts[0]
    if not x.ndim:
        return None
    dims = [dim % x.ndim for dim in call.args[1]]
    cut = [dim for dim in dims if x.dims[dim]]
    if not cut or len(set(dims)) != len(dims):
        return None
    if len(dims) > 1:
        return Composite(lambda x, dims: _one_by_one(x, dims, torch.flip))
    (dim,) = dims
    length = x.shape[dim]
    return _moved(call, x, dim, lambda: torch.arange(length - 1, -1, -1))


def _one_by_one(x: Tensor, dims: Sequence[int], turn: Callable[..., Tensor]) -> Tensor:
    for dim in dims:
        x = turn(x, [dim])
    return x


def roll_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`roll(x, shifts, dims)`: only what crosses the borders of shards is sent."""
    x, shifts, dims = layouts[0], call.args[1], call.args[2]
    if not x.ndim or 0 in x.shape:
        return None
    if not dims:
        if x.is_replicated or len(shifts) != 1:
            return None
        return Composite(lambda x, shifts, dims: x.reshape(-1).roll(shifts, 0).reshape(x.shape))
    if len(shifts) != len(dims) or not any(x.dims[dim % x.ndim] for dim in dims):
        return None
    if len(dims) > 1:
        return Composite(_rolls)
    dim, shift = dims[0] % x.ndim, shifts[0]
    length = x.shape[dim]
    return _moved(call, x, dim, lambda: (torch.arange(length) - shift) % length)


def _rolls(x: Tensor, shifts: Sequence[int], dims: Sequence[int]) -> Tensor:
    for shift, dim in zip(shifts, dims):
        x = x.roll(shift, dim)
    return x


def repeat_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Composite | None:
    """`repeat(x, times)`, `tile`: fewer copies than shards are laid side by side, so that each
    rank receives its own block of them. For more than that the whole is no more to receive, and
    a dim that is not repeated can be cut instead."""
    x = layouts[0]
    times = (1,) * (x.ndim - len(call.args[1])) + tuple(call.args[1])
    skip = len(times) - x.ndim
    few = [
        dim for dim in range(x.ndim)
        if x.dims[dim] and 1 < times[skip + dim] < x.num_shards(dim)
    ]
    free = [x.shape[dim] for dim in range(x.ndim) if not x.dims[dim] and times[skip + dim] == 1]
    if not few or 0 in times or max(free, default=0) >= x.num_shards(few[0]):
        return None
    rest = [1 if at - skip in few else num for at, num in enumerate(times)]

    def beside(x: Tensor, _: Sequence[int]) -> Tensor:
        for dim in few:
            x = torch.cat([x] * times[skip + dim], dim)
        return x.repeat(rest)

    return Composite(beside)


def _moved(call: Call, x: Layout, dim: int, sources: Callable[[], Tensor]) -> Local:
    """A result of the layout of x, element i of whose `dim` is element `sources[i]` of x's."""
    shared = Layout.replicated(x.mesh, x.shape[dim : dim + 1])
    parted = Layout.make(x.mesh, shared.shape, x.dims[dim : dim + 1], x.cuts[dim : dim + 1])

    def bind(mesh: BoundMesh) -> Callable[[Tensor], Tensor]:
        units = Units(mesh, x, (dim,))
        asker = asker_of(mesh, Places(shared, parted, 0), units.axes)
        holder, row = units.locate([sources().to(mesh.device)])
        routes = share(Post(units.comm, call.op), holder, row, asker)

        def local(block: Tensor) -> Tensor:
            rows, _ = as_rows(block, (dim,))
            return to_place(routes.fetch(rows), 1, dim)

        return local

    return Local(Decision((x,), (x,)), bind, communicates=x.dims[dim])


def diag_embed_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local | None:
    """`diag_embed(x, offset, dim1, dim2)`: rows are cut where the elements are."""
    x, offset, one, other = layouts[0], *call.args[1:4]
    shape = call.results[0].shape
    one, other = one % len(shape), other % len(shape)
    size, row, column = shape[one], max(-offset, 0), max(offset, 0)
    old = x.cuts_of(x.ndim - 1)
    rows = (0, *(cut + row for cut in old[1:-1]), size)
    axes, cuts = list(x.dims[:-1]), list(x.cuts[:-1])
    for dim in sorted((one, other)):
        axes.insert(dim, x.dims[-1] if dim == one else ())
        cuts.insert(dim, rows if dim == one and x.dims[-1] else None)
    result = Layout.make(x.mesh, shape, axes, cuts, x.partial)

    def bind(mesh: BoundMesh) -> Callable[[Tensor], Tensor]:
        assert mesh.here is not None
        start, stop = x.box_at(mesh.here)[-1]
        first, last = result.box_at(mesh.here)[one]
        pad = [start + column, size - stop - column, start + row - first, last - stop - row]

        def local(block: Tensor) -> Tensor:
            out = torch.constant_pad_nd(block.diag_embed(), pad)
            return out.movedim((-2, -1), (one, other)).contiguous()

        return local

    return Local(Decision((x,), (result,)), bind)
