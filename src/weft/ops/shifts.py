"""Ops whose elements have places in the result that are known without data: repeat, shuffled
channels, diag_embed."""

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


def _shuffled(x: Tensor, groups: int) -> Tensor:
    """channel_shuffle of local tensors, whose kernel returns nothing as a view of nothing."""
    return torch.channel_shuffle(x, groups) if x.numel() else x.clone()


PAGE = page(
    op("channel_shuffle native_channel_shuffle",
       rule("b c! ... -> b c ...", linear=[0], moves=True), layouts=_channel_shuffle,
       local=_shuffled),
    op("repeat tile", rule(_repeat_rule, linear=[0], moves=True), layouts=_repeat),
    op("diag_embed", layouts=_diag_embed),
)
