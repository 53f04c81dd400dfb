"""Ops whose elements have places in the result that are known without data: repeat, diag_embed, and
compositions of reads, slices and views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Composite, Local
from weft.ops.indexing.rows import known_rows
from weft.rules import Call, Decision, op, page, rule
from weft.rules.factors import names

__all__ = ["PAGE"]

Layouts = Sequence[Layout]


def _moved(x: Layout, dim: int, source: Tensor, line: Layout) -> Local:
    """Where x has `dim`, the result has `line`, whose place p is the element `source[p]`."""
    result = x.take([at for at in range(x.ndim) if at != dim]).insert(dim, line)
    return Local(
        Decision((x,), (result,)),
        lambda mesh: known_rows(mesh, x, (dim,), line, 0, [source], result),
        communicates=x.dims[dim],
    )


def _channel_shuffle(call: Call, layouts: Layouts, wants_grad: Any) -> Local | None:
    """Sharded channels change shards, each once."""
    (x,), groups = layouts, call.get("groups")
    if not x.dims[1]:
        return None
    source = torch.arange(x.shape[1]).view(groups, -1).t().reshape(-1)
    return _moved(x, 1, source, x.take([1]).without_partial())


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
    line = Layout.make(x.mesh, (shape[dim],), [x.dims[dim]])
    return _moved(x, dim, torch.arange(shape[dim]) % x.shape[dim], line)


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


# Compositions of reads, slices, views and these.


def _native_shuffle(x: Tensor, groups: int) -> Tensor:
    """As `channel_shuffle`, which has a derivative."""
    return torch.channel_shuffle(x, groups)


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
    op("channel_shuffle", rule("b c! ... -> b c ...", linear=[0], moves=True),
       layouts=_channel_shuffle),
    op("native_channel_shuffle", compose=_native_shuffle),
    op("repeat tile", rule(_repeat_rule, linear=[0], moves=True), layouts=_repeat),
    op("diag_embed", layouts=_diag_embed),
    op("diag", compose=_diag),
    op("diagflat", compose=_diagflat),
    op("rot90", compose=_rot90),
    op("pixel_shuffle", compose=_pixel_shuffle),
    op("pixel_unshuffle", compose=_pixel_unshuffle),
)
