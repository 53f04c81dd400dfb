"""Ops whose elements have places in the result that are known without data: flip, repeat, shuffled
channels, diag_embed.

Along a sharded dim each rank receives the missing elements of its part of the result, each once.
Routes are made once, with the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Composite, Local
from weft.ops.indexing.grids import exchange_along
from weft.ops.indexing.index_layouts import Cuts, IndexLayout, askers
from weft.ops.indexing.row_exchange import RowExchange, Units, plan_together
from weft.ops.indexing.rows import as_rows, to_place
from weft.rules import Call, Decision, Rule, op, page, rule
from weft.rules.factors import names
from weft.transport import Shards

__all__ = ["PAGE"]

Layouts = Sequence[Layout]


# Elements that change places along dims which keep their length: kernels.


def _fetching(
    mesh: BoundMesh, x: Layout, dim: int, parted: Layout, source: Tensor, last: bool = False
) -> Callable[[Tensor], Tensor]:
    """From a block of x that of a result with dims `parted` where x has `dim`, whose place p is
    element `source[p]` of that dim. Where `last`, dims of `parted` but the first one stand behind
    all dims of x."""
    assert mesh.here is not None
    units = Units(mesh, x, (dim,))
    places = IndexLayout(Layout.replicated(x.mesh, parted.shape), parted, 0)
    holder, row = units.locate([source.to(mesh.device)])
    asker = askers(mesh, places, units.axes)
    routes = plan_together(RowExchange(units.comm, "shift"), holder, row, asker, once=True)
    mine = parted.local_shape_at(mesh.here)

    def local(block: Tensor) -> Tensor:
        rows, others = as_rows(block, (dim,))
        out = routes.fetch(rows).view(*mine, *others)
        if last and len(mine) > 1:
            behind = range(1, len(mine))
            out = out.movedim(tuple(behind), tuple(at - len(mine) for at in behind))
            return out.movedim(0, dim).contiguous()
        return to_place(out, len(mine), dim)

    return local


def _rearranged(
    shards: Shards, x: Tensor, sources: Mapping[int, Callable[[int], Tensor]]
) -> Tensor:
    """Of each of these sharded dims, of a length n, place p shows place `sources[dim](n)[p]`."""
    def make(mesh: BoundMesh, layout: Layout) -> Callable[[Tensor], Tensor]:
        if len(sources) > 1:
            return exchange_along(mesh, layout, sources)
        ((dim, source),) = sources.items()
        length = layout.shape[dim]
        line = Layout.make(layout.mesh, (length,), [layout.dims[dim]], [layout.cuts[dim]])
        return _fetching(mesh, layout, dim, line, source(length))

    return shards.exchange(x, make)


def _backwards(length: int) -> Tensor:
    return torch.arange(length - 1, -1, -1)


def _flip(shards: Shards, x: Tensor, dims: Sequence[int]) -> Tensor:
    """Whole dims are turned in place; along the others elements change shards, each once."""
    turned = {dim % x.dim() for dim in dims}
    whole = [dim for dim in turned if dim not in shards.dims]
    if whole:
        x = x.flip(whole)
    sharded = [dim for dim in shards.dims if dim in turned]
    return _rearranged(shards, x, dict.fromkeys(sharded, _backwards)) if sharded else x.clone()


def _flip_of(dim: int) -> Callable[[Shards, Tensor], Tensor]:
    def kernel(shards: Shards, x: Tensor) -> Tensor:
        return _flip(shards, x, [dim])

    kernel.__doc__ = "Elements change shards, each once."
    return kernel


def _channel_shuffle(shards: Shards, x: Tensor, groups: int) -> Tensor:
    """Channels change shards, each once."""
    return _rearranged(shards, x, {
        1: lambda length: torch.arange(length).view(groups, -1).t().reshape(-1)
    })


_SHUFFLE = rule("b c~ ... -> b c ...", linear=[0], moves=True)


def _native_shuffle(call: Call, wants_grad: Sequence[bool]) -> Rule | None:
    """As `channel_shuffle`, which has a derivative."""
    found = _SHUFFLE.bind(call, wants_grad)
    return found and replace(found, op="aten.channel_shuffle.default")


# Dims of another length: the result has cuts of its own.


def _moved(
    x: Layout, dim: int, sources: Callable[[], Tensor], shape: Sequence[int], cuts: Cuts,
    last: bool = False,
) -> Local:
    """`_fetching`, where the first of the new dims, of `shape`, is cut by what cuts `dim`, at
    `cuts`."""
    rest = [()] * (len(shape) - 1)
    parted = Layout.make(x.mesh, shape, [x.dims[dim], *rest], [cuts, *[None] * len(rest)])
    result = x.take([at for at in range(x.ndim) if at != dim]).insert(dim, parted)
    if last and rest:
        order = [at for at in range(result.ndim) if not dim < at < dim + len(shape)]
        result = result.take([*order, *range(dim + 1, dim + len(shape))])
    return Local(
        Decision((x,), (result,)),
        lambda mesh: _fetching(mesh, x, dim, parted, sources(), last), communicates=x.dims[dim],
    )


def _repeat_rule(call: Call, wants_grad: Any) -> str:
    """A dim that is repeated is whole; the others pass."""
    source, result = call.tensors[0].shape, call.results[0].shape
    skip = len(result) - len(source)
    given, made = [], [f"r{dim}" for dim in range(skip)]
    for dim, name in enumerate(names(len(source))):
        same = result[skip + dim] == source[dim]
        given.append(name if same else f"{name}!")
        made.append(name if same else f"y{dim}!")
    return f"{' '.join(given)} -> {' '.join(made)}"


def _repeat(call: Call, layouts: Layouts, wants_grad: Any) -> Local | Composite | None:
    """If the repeated dim is sharded, each shard of the result receives its stretch."""
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
    return _moved(x, dim, lambda: torch.arange(length) % size, (length,), None)


def _repeats(x: Tensor, times: Sequence[int]) -> Tensor:
    times = [1] * (x.dim() - len(times)) + list(times)
    more = len(times) - x.dim()
    for at in range(x.dim()):
        if times[more + at] != 1:
            x = x.repeat([times[more + at] if dim == at else 1 for dim in range(x.dim())])
    if not more:
        return x
    return x.expand([*times[:more], *x.shape]).clone(memory_format=torch.contiguous_format)


def _diag_embed(call: Call, layouts: Layouts, wants_grad: Any) -> Local:
    """`diag_embed(x, offset, dim1, dim2)`: rows are sharded as the elements are."""
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


# Compositions of slices, views and these.


def _diag(x: Tensor, diagonal: int = 0) -> Tensor:
    """The diagonal, or a matrix of it: elements stay on their ranks; any dim may be sharded."""
    return x.diag_embed(diagonal) if x.dim() == 1 else x.diagonal(diagonal).clone()


def _diagflat(x: Tensor, offset: int = 0) -> Tensor:
    """The matrix whose diagonal is all elements: its rows have the cuts of the elements."""
    return x.reshape(-1).diag_embed(offset)


def _rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Flips and a transposition: any dim may be sharded; a turned sharded dim is exchanged."""
    one, other = dims
    match k % 4:
        case 1:
            return x.flip([other]).transpose(one, other)
        case 2:
            return x.flip([one, other])
        case 3:
            return x.flip([one]).transpose(one, other)
    return x.clone()


def _pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    """Channels unfolded into height and width: batch and positions stay sharded, channels by whole
    groups."""
    *lead, channels, height, width = x.shape
    apart = x.reshape([*lead, channels // factor**2, factor, factor, height, width])
    at = len(lead)
    order = [*range(at), at, at + 3, at + 1, at + 4, at + 2]
    shape = [*lead, channels // factor**2, height * factor, width * factor]
    return apart.permute(order).reshape(shape)


def _pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    """Height and width folded into channels: batch and channels stay sharded, positions by whole
    steps."""
    *lead, channels, height, width = x.shape
    apart = x.reshape([*lead, channels, height // factor, factor, width // factor, factor])
    at = len(lead)
    order = [*range(at), at, at + 2, at + 4, at + 1, at + 3]
    shape = [*lead, channels * factor**2, height // factor, width // factor]
    return apart.permute(order).reshape(shape)


PAGE = page(
    op("flip", rule("... s~ -> ... s", along="dims", linear=[0], moves=True), kernel=_flip),
    op("fliplr", rule("a s~ ... -> a s ...", linear=[0], moves=True), kernel=_flip_of(1)),
    op("flipud", rule("s~ ... -> s ...", linear=[0], moves=True), kernel=_flip_of(0)),
    op("channel_shuffle", _SHUFFLE, kernel=_channel_shuffle),
    op("native_channel_shuffle", rule(_native_shuffle), kernel=_channel_shuffle),
    op("repeat tile", rule(_repeat_rule, linear=[0], moves=True), layouts=_repeat),
    op("diag_embed", layouts=_diag_embed),
    op("diag", compose=_diag),
    op("diagflat", compose=_diagflat),
    op("rot90", compose=_rot90),
    op("pixel_shuffle", compose=_pixel_shuffle),
    op("pixel_unshuffle", compose=_pixel_unshuffle),
)
