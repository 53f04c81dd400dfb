"""Halos on one rank: what ranks read of others' shards, and its transpose.

Who sends what to whom is in the step (`Fetch`, `Fold`), and is carried out here. Where dims are
rings, a piece may stand at several places of a box, and a rank may be its own neighbour on both
sides. What is fetched of other dims moves as boxes do between layouts (`steps`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh, Communicator
from weft.core.layout import Box
from weft.planner import Fetch, Fold, is_local, step_nbytes
from weft.planner.geometry import Coordinate, volume
from weft.transport.boxes import Move, part, shape_of

__all__ = ["DENSE", "filling", "group_of", "halo_exchange", "limit", "outside", "weight"]

DENSE = 128
"""An all-to-all starts sending to all others at once, and copies no more than messages do.
If most ranks have something for each other, messages pay off only from this many times the bytes.
"""


def group_of(
    step: Fetch | Fold, at: Coordinate, mesh: BoundMesh
) -> tuple[Communicator, dict[Coordinate, int]]:
    """The communicator of a step, and the places of ranks in it; of itself alone where nothing is
    sent."""
    axes = () if is_local(step) else step.axes
    return mesh.comm(axes), {peer: at for at, peer in enumerate(mesh.along(axes, at))}


def weight(step: Fetch | Fold, comm: Communicator) -> int:
    """The weight of an exchange: a halo comes from the shards on both sides in each dim that is
    read."""
    pieces = 3 ** sum(mine is not None for mine in step.cover.reads)
    return DENSE if 2 * pieces > comm.size else 0


def outside(wanted: Box, inside: Box) -> tuple[Box, ...]:
    """The boxes, apart, that `wanted` has around `inside`."""
    if not volume(inside):
        return (wanted,) if volume(wanted) else ()
    found = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(wanted, inside)):
        for interval in ((start, first), (last, stop)):
            if interval[0] < interval[1]:
                found.append((*inside[:dim], interval, *wanted[dim + 1 :]))
    return tuple(found)


def filling(parts: Sequence[Move], fill: float) -> Callable[[Tensor], None]:
    """What fills parts of a new tensor."""
    def filled(out: Tensor) -> None:
        value: Any = fill
        if math.isinf(fill) and not out.is_floating_point():
            value = torch.iinfo(out.dtype).min if fill < 0 else torch.iinfo(out.dtype).max
        for cut in parts:
            cut(out).fill_(value)

    return filled


def limit(comm: Communicator, weight: int) -> float:
    """The number of bytes from which on pieces travel by themselves."""
    least = comm.swaps_from_nbytes
    return least if least == math.inf else least * weight


def halo_exchange(step: Fetch | Fold, at: Coordinate, mesh: BoundMesh) -> Move:
    """Parts of boxes come from their owners, or go to them. Owners add what they hold, and then
    what arrives, in the order of the group. A rank sends one buffer to each rank that needs
    something from it."""
    comm, place = group_of(step, at, mesh)
    adds = isinstance(step, Fold)
    boxes, owners = (step.src, step.dst) if adds else (step.dst, step.src)
    box, own = step.cover.box_at(boxes, at), owners.box_at(at)
    lengths = {dim: boxes.shape[dim] for dim in step.cover.rings}

    def cuts(blocks: Sequence[tuple[Coordinate, Box]], of_box: bool) -> dict[int, list[Any]]:
        """Per rank, the shapes of pieces of the box or of what this rank owns, and their places."""
        found: dict[int, list[Any]] = {}
        for peer, piece in blocks:
            if volume(piece):
                where = piece if of_box else _home(piece, lengths)
                cut = part(where, box if of_box else own)
                found.setdefault(place[peer], []).append((shape_of(where), cut))
        return dict(sorted(found.items()))

    sends, receives = cuts(step.sends(at), adds), cuts(step.receives(at), not adds)
    kept = [*zip(sends.pop(comm.index, ()), receives.pop(comm.index, ()))]
    send, recv = [
        [sum(math.prod(size) for size, _ in its.get(to, ())) for to in range(comm.size)]
        for its in (sends, receives)
    ]
    given, taken = [[piece for some in its.values() for piece in some] for its in (sends, receives)]
    sizes = [math.prod(size) for size, _ in taken]
    mean = step_nbytes(step, 1) / step.src.mesh.size()
    least = limit(comm, weight(step, comm))

    def brought(x: Tensor) -> Sequence[Tensor]:
        """The pieces that others have, by rank."""
        flat = torch.cat([cut(x).reshape(-1) for _, cut in given]) if given else x.new_empty(0)
        if mean * x.element_size() < least:
            return comm.all_to_all(flat, send, recv).split(sizes)
        got = x.new_empty(sum(recv))
        sent, arriving = [
            [(to, buffer) for to, buffer in enumerate(whole.split(each)) if buffer.numel()]
            for whole, each in ((flat, send), (got, recv))
        ]
        comm.swap(sent, arriving, x.dtype)()
        return got.split(sizes)

    shape = shape_of(own if adds else box)
    beyond = () if adds else outside(box, step.cover.inside_at(boxes, at))
    filled = filling([part(one, box) for one in beyond], step.cover.fill)
    is_whole = adds and [size for _, (size, _) in kept] == [shape]

    def run(x: Tensor) -> Tensor:
        got = brought(x)
        if is_whole:
            _, held = kept[0][0]
            out = held(x).clone(memory_format=torch.contiguous_format)
        else:
            out = x.new_zeros(shape) if adds else x.new_empty(shape)
            filled(out)
            for (_, held), (_, cut) in kept:
                (cut(out).add_ if adds else cut(out).copy_)(held(x))
        for (size, cut), piece in zip(taken, got):
            (cut(out).add_ if adds else cut(out).copy_)(piece.view(size))
        return out

    return run


def _home(box: Box, lengths: dict[int, int]) -> Box:
    """Where a box lies in a tensor of which these dims, of these lengths, are rings."""
    return tuple([
        (start, stop) if dim not in lengths
        else (start % lengths[dim], start % lengths[dim] + stop - start)
        for dim, (start, stop) in enumerate(box)
    ])
