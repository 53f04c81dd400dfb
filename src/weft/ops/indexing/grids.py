"""Elements whose positions along several sharded dims change at once: flips, rolls.

Each dim changes independently, so what one rank sends another is a grid: in each dim, the positions
of its block whose elements lie in the other's block of the result. One exchange therefore serves
all dims, each element is sent once, and no list is longer than a dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.indexing.row_exchange import RowExchange, Units

__all__ = ["exchange_along"]


@dataclass(frozen=True, slots=True)
class _Line:
    """One dim, as this rank exchanges it.

    Args:
        dim: its number.
        steps: per shard of the dim, its contribution to a rank's position in the group.
        sends: per shard, the positions in this rank's block whose elements it gets, in its order.
        gets: the number of elements that this rank gets from each shard.
        order: for each position of this rank's result, where it finds its element among all that
            the rank gets, shard by shard.
    """

    dim: int
    steps: list[int]
    sends: list[Tensor]
    gets: list[int]
    order: Tensor


def exchange_along(
    mesh: BoundMesh, x: Layout, sources: Mapping[int, Callable[[int], Tensor]]
) -> Callable[[Tensor], Tensor]:
    """A function from a block of x to the block of a result with the layout of x. Along each of
    these dims, of length n, position p of the result is position `sources[dim](n)[p]` of x. One
    exchange runs over all axes that shard these dims."""
    assert mesh.here is not None
    dims = sorted(sources)
    units = Units(mesh, x, dims)
    box = x.box_at(mesh.here)
    lines = [
        _line(dim, sources[dim](x.shape[dim]).to(mesh.device), table, box[dim])
        for dim, table in zip(dims, units.tables)
    ]
    return _exchange(RowExchange(units.comm, "shift"), lines)


def _line(
    dim: int, source: Tensor, table: tuple[Tensor, Tensor, Tensor] | None, side: tuple[int, int]
) -> _Line:
    """`table`: the cuts of the dim and the steps of its shards, if it is sharded."""
    cuts, steps = ([0, len(source)], [0]) if table is None else (
        table[0].tolist(), table[1].tolist())
    start, stop = side
    sends = []
    for first, last in pairwise(cuts):
        wanted = source[first:last]
        sends.append(wanted[(wanted >= start) & (wanted < stop)] - start)
    borders = torch.tensor(cuts, device=source.device)
    holders = torch.searchsorted(borders, source[start:stop].contiguous(), right=True) - 1
    order = holders.argsort(stable=True).argsort()
    return _Line(dim, steps, sends, holders.bincount(minlength=len(steps)).tolist(), order)


def _exchange(exchange: RowExchange, lines: list[_Line]) -> Callable[[Tensor], Tensor]:
    size = exchange.comm.size

    def local(block: Tensor) -> Tensor:
        rest = math.prod(n for dim, n in enumerate(block.shape) if all(
            dim != line.dim for line in lines))
        parts: list[Tensor] = [block] * size
        for place, part in _parts(block, lines, 0):
            parts[place] = part.reshape(-1)
        gets = [0] * size
        for place, lengths in _lengths(lines, 0):
            gets[place] = math.prod(lengths) * rest
        sends = [part.numel() for part in parts]
        pieces = exchange.send(torch.cat(parts), sends, gets).split(gets)
        return _joined(pieces, list(block.shape), lines, 0).contiguous()

    return local


def _parts(block: Tensor, lines: list[_Line], place: int) -> Iterator[tuple[int, Tensor]]:
    """What each rank of the group gets of this rank's block."""
    if not lines:
        yield place, block
        return
    for step, send in zip(lines[0].steps, lines[0].sends):
        yield from _parts(block.index_select(lines[0].dim, send), lines[1:], place + step)


def _lengths(lines: list[_Line], place: int) -> Iterator[tuple[int, list[int]]]:
    """The lengths, in each dim, of what each rank sends to this one."""
    if not lines:
        yield place, []
        return
    for step, count in zip(lines[0].steps, lines[0].gets):
        for at, lengths in _lengths(lines[1:], place + step):
            yield at, [count, *lengths]


def _joined(
    pieces: tuple[Tensor, ...], shape: list[int], lines: list[_Line], place: int
) -> Tensor:
    """The block of the result, from what each rank has sent."""
    if not lines:
        return pieces[place].view(shape)
    line, found = lines[0], []
    for step, count in zip(line.steps, line.gets):
        shape[line.dim] = count
        found.append(_joined(pieces, shape, lines[1:], place + step))
    return torch.cat(found, line.dim).index_select(line.dim, line.order)
