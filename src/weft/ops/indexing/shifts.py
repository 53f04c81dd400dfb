"""Elements whose places in the result are known without data: flip, roll, repeat, unfold,
the borders of a pad, channels that change places, diag_embed.

Along a cut dim each shard gets what its place in the result needs and it does not hold, each
element once: of a halo the halo. Routes are made once, with the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Local
from weft.ops.indexing.grids import moved_along
from weft.ops.indexing.named import Cuts, Places, asker_of
from weft.ops.indexing.read import as_rows, joined, to_place
from weft.ops.indexing.routes import Post, Units, share
from weft.rules import Call, Decision

__all__ = [
    "diag_embed_lookup", "flip_lookup", "flip_sides_lookup", "pad_lookup", "repeat_lookup",
    "roll_lookup", "shuffle_lookup", "unfold_lookup",
]


def flip_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`flip(x, dims)`: dims that are whole turn where they lie."""
    x = layouts[0]
    if not x.ndim:
        return None
    dims = [dim % x.ndim for dim in call.args[1]]
    if not dims:
        return Composite(lambda x, dims: x.clone())
    cut = [dim for dim in dims if x.dims[dim]]
    if not cut or len(set(dims)) != len(dims):
        return None
    if len(cut) > 1:
        return moved_along(call, x, {dim: _backwards(x.shape[dim]) for dim in dims})
    if len(dims) > 1:
        return Composite(lambda x, dims: _one_by_one(x, dims, torch.flip))
    (dim,) = dims
    return _moved(call, x, dim, _backwards(x.shape[dim]))


def _backwards(length: int) -> Callable[[], Tensor]:
    return lambda: torch.arange(length - 1, -1, -1)


def _one_by_one(x: Tensor, dims: Sequence[int], turn: Callable[..., Tensor]) -> Tensor:
    for dim in dims:
        x = turn(x, [dim])
    return x


def flip_sides_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`fliplr` and `flipud` of a cut dim: a flip of it."""
    dim = 1 if call.op.startswith("aten.fliplr") else 0
    return Composite(lambda x: x.flip([dim])) if layouts[0].dims[dim] else None


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
    total: dict[int, int] = {}
    for dim, shift in zip(dims, shifts):
        total[dim % x.ndim] = total.get(dim % x.ndim, 0) + shift
    if sum(bool(x.dims[dim]) for dim in total) > 1:
        return moved_along(call, x, {
            dim: _shifted(x.shape[dim], shift) for dim, shift in total.items()
        })
    if len(dims) > 1:
        return Composite(_rolls)
    ((dim, shift),) = total.items()
    return _moved(call, x, dim, _shifted(x.shape[dim], shift))


def _shifted(length: int, shift: int) -> Callable[[], Tensor]:
    return lambda: (torch.arange(length) - shift) % length


def _rolls(x: Tensor, shifts: Sequence[int], dims: Sequence[int]) -> Tensor:
    for shift, dim in zip(shifts, dims):
        x = x.roll(shift, dim)
    return x


def _moved(
    call: Call, x: Layout, dim: int, sources: Callable[[], Tensor],
    shape: Sequence[int] | None = None, cuts: Cuts = None, last: bool = False,
) -> Local:
    """A result whose place p, in new dims of `shape` where x has `dim`, is element `sources[p]` of
    that dim. The first of them is cut by what cuts `dim`, at `cuts`; without a shape as x is. Where
    `last`, the others stand behind all dims of x."""
    cuts = x.cuts[dim] if shape is None else cuts
    shape = (x.shape[dim],) if shape is None else tuple(shape)
    rest = [()] * (len(shape) - 1)
    shared = Layout.replicated(x.mesh, shape)
    parted = Layout.make(x.mesh, shape, [x.dims[dim], *rest], [cuts, *[None] * len(rest)])
    kept = [at for at in range(x.ndim) if at != dim]
    result = joined(x, kept, parted, dim, x.partial)
    if last and rest:
        order = [at for at in range(result.ndim) if not dim < at < dim + len(shape)]
        order += range(dim + 1, dim + len(shape))
        result = Layout.make(
            x.mesh, *([of[at] for at in order] for of in (result.shape, result.dims, result.cuts)),
            result.partial,
        )

    def bind(mesh: BoundMesh) -> Callable[[Tensor], Tensor]:
        assert mesh.here is not None
        units = Units(mesh, x, (dim,))
        asker = asker_of(mesh, Places(shared, parted, 0), units.axes)
        holder, row = units.locate([sources().to(mesh.device)])
        routes = share(Post(units.comm, call.op), holder, row, asker, once=True)
        mine = parted.local_shape_at(mesh.here)

        def local(block: Tensor) -> Tensor:
            rows, others = as_rows(block, (dim,))
            out = routes.fetch(rows).view(*mine, *others)
            if last and rest:
                behind = range(1, len(mine))
                out = out.movedim(tuple(behind), tuple(at - len(mine) for at in behind))
                return out.movedim(0, dim).contiguous()
            return to_place(out, len(mine), dim)

        return local

    return Local(Decision((x,), (result,)), bind, communicates=x.dims[dim])


def _grown(x: Layout, dim: int, before: int, length: int) -> Cuts:
    """The cuts of a dim that has grown by so much in front, and behind to this length: what is new
    lies with the first and the last shard. Places stay at home as far as they can."""
    if not x.dims[dim]:
        return None
    inner = [min(max(cut + before, 0), length) for cut in x.cuts_of(dim)[1:-1]]
    return (0, *inner, length)


def pad_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`pad` with what stands in the tensor (reflect, replicate, circular): along a cut dim borders
    come from the shards that hold them."""
    x, mode, pad = layouts[0], call.args[2], list(call.args[1])
    padded = {x.ndim - 1 - at // 2 for at, width in enumerate(pad) if width}
    if mode == "constant" or (len(pad) // 2 != x.ndim - 2 and len(pad) // 2 != x.ndim - 1):
        return None
    if len(padded) > 1:
        return Composite(_pads)
    if not padded or 0 in x.shape:
        return None
    (dim,) = padded
    before, behind = pad[2 * (x.ndim - 1 - dim) :][:2]
    size, length = x.shape[dim], call.results[0].shape[dim]
    start, stop = max(-before, 0), size + min(behind, 0)  # what a negative width leaves
    if not x.dims[dim] or not length or (
        # Of a circle shorter than its borders torch reads what it has not written yet.
        mode == "circular" and stop - start < max(before, behind)
    ):
        return None
    find = _BORDERS[mode]
    return _moved(
        call, x, dim,
        lambda: find(torch.arange(-before, size + behind), size, start, stop), (length,),
        _grown(x, dim, before, length),
    )


_BORDERS: dict[str, Callable[[Tensor, int, int, int], Tensor]] = {
    "replicate": lambda at, size, start, stop: at.clamp(0, size - 1),
    "circular": lambda at, size, start, stop: start + (at - start) % (stop - start),
    "reflect": lambda at, size, start, stop: (size - 1) - (size - 1 - at.abs()).abs(),
}
"""Mode -> where in a dim of this size, of which start to stop is kept, the places before, in and
behind it are taken from: only a circle is cropped before it is closed."""


def _pads(x: Tensor, pad: Sequence[int], mode: str, value: Any = None) -> Tensor:
    """One dim after the other, first the one that is whole, if there is one."""
    for at in range(0, len(pad), 2):
        if pad[at] or pad[at + 1]:
            own = [width if place // 2 == at // 2 else 0 for place, width in enumerate(pad)]
            x = torch.ops.aten.pad(x, own, mode)
    return x


def repeat_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`repeat` and `tile` of a cut dim: each shard of the result gets the stretch that it shows."""
    x, shape = layouts[0], call.results[0].shape
    skip = len(shape) - x.ndim
    grown = [dim for dim in range(x.ndim) if shape[skip + dim] != x.shape[dim]]
    cut = [dim for dim in grown if x.dims[dim]]
    free = [x.shape[dim] for dim in range(x.ndim) if not x.dims[dim] and dim not in grown]
    if 0 in shape or not cut or max(free, default=0) >= x.num_shards(cut[0]):
        return None  # a dim that is not repeated is cut instead
    if len(grown) > 1 or skip:
        return Composite(_repeats)
    (dim,) = grown
    size, length = x.shape[dim], shape[dim]
    return _moved(call, x, dim, lambda: torch.arange(length) % size, (length,))


def _repeats(x: Tensor, times: Sequence[int]) -> Tensor:
    times = [1] * (x.dim() - len(times)) + list(times)
    more = len(times) - x.dim()
    for at in range(x.dim()):
        if times[more + at] != 1:
            x = x.repeat([times[more + at] if dim == at else 1 for dim in range(x.dim())])
    if not more:
        return x
    return x.expand([*times[:more], *x.shape]).clone(memory_format=torch.contiguous_format)


def unfold_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`unfold(x, dim, size, step)` of a cut dim: a window lies where its first element does, and
    gets what it shows of later shards."""
    x = layouts[0]
    if not x.ndim:
        return None
    dim, size, step = call.args[1] % x.ndim, call.args[2], call.args[3]
    num = call.results[0].shape[dim]
    if not x.dims[dim] or not num or not size or 0 in x.shape:
        return None
    inner = [min(-(-cut // step), num) for cut in x.cuts_of(dim)[1:-1]]
    return _moved(
        call, x, dim,
        lambda: torch.arange(num).unsqueeze(1) * step + torch.arange(size), (num, size),
        (0, *inner, num), last=True,
    )


def shuffle_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`channel_shuffle(x, groups)`: cut channels change places, the others' rules serve."""
    x, groups = layouts[0], call.args[1]
    if x.is_replicated or 0 in x.shape:
        return None
    if not x.dims[1]:
        return Composite(_shuffled)
    channels = x.shape[1]
    return _moved(
        call, x, 1, lambda: torch.arange(channels).view(groups, -1).t().reshape(-1)
    )


def _shuffled(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(1, (groups, x.shape[1] // groups)).transpose(1, 2).flatten(1, 2)


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
