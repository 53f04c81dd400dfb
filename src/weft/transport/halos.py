"""Halos on one rank: what ranks read of others' shards, and its transpose.

Who sends what to whom is in the step (`Fetch`, `Fold`), and is carried out here. Where dims are
rings, a piece may stand at several places of a box, and a rank may be its own neighbour on both
sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.comm import BoundMesh, Communicator
from weft.core.layout import Box
from weft.planner import Fetch, Fold, is_local, step_nbytes
from weft.planner.geometry import Coordinate, volume
from weft.transport.boxes import Move, joined, outside, pack, part, shape_of

__all__ = ["halo_exchange", "limit", "weight"]

_DENSE = 128


def weight(pieces: float, comm: Communicator) -> int:
    """The weight of an exchange in which boxes consist of so many pieces.

    An all-to-all starts sending to all others at once, and copies no more than messages do. If most
    ranks have something for each other, messages pay off only from many times the bytes.
    """
    return _DENSE if 2 * pieces > comm.size else 0


def limit(comm: Communicator, weight: int) -> float:
    """The number of bytes from which on pieces travel by themselves."""
    least = comm.swaps_from_nbytes
    return least if least == math.inf else least * weight


def halo_exchange(step: Fetch | Fold, at: Coordinate, mesh: BoundMesh) -> Move:
    """Parts of boxes come from their owners, or go to them. Owners add what they hold, and then
    what arrives, in the order of the group. A rank sends one buffer to each rank that needs
    something from it."""
    axes = () if is_local(step) else step.axes
    comm = mesh.comm(axes)
    place = {peer: number for number, peer in enumerate(mesh.along(axes, at))}
    adds, boxes = step.adds, step.boxes
    box, own = step.cover.box_at(boxes, at), step.shards.box_at(at)
    lengths = {dim: boxes.shape[dim] for dim in step.cover.rings}

    def by_rank(blocks: Sequence[tuple[Coordinate, Box]], of_box: bool) -> list[list[Box]]:
        """Pieces, with their places in the box or in what this rank owns."""
        found: list[list[Box]] = [[] for _ in range(comm.size)]
        for peer, piece in blocks:
            if volume(piece):
                found[place[peer]].append(piece if of_box else _home(piece, lengths))
        return found

    held, wanted = (box, own) if adds else (own, box)
    sends, receives = by_rank(step.sends(at), adds), by_rank(step.receives(at), not adds)
    kept, sends[comm.index] = [part(one, held) for one in sends[comm.index]], []
    stays, receives[comm.index] = receives[comm.index], []
    taken = [one for some in receives for one in some]
    sizes, shapes = [*map(volume, taken)], [*map(shape_of, taken)]
    send, recv = ([sum(map(volume, some)) for some in its] for its in (sends, receives))
    packed = pack([one for some in sends for one in some], held)
    mean = step_nbytes(step, 1) / step.src.mesh.size()
    # A halo comes from the shards on both sides in each dim that is read.
    pieces = 3 ** sum(mine is not None for mine in step.cover.reads)
    least = limit(comm, weight(pieces, comm))

    def brought(x: Tensor) -> Sequence[Tensor]:
        """The pieces that others have, by rank."""
        flat = packed(x)
        if mean * x.element_size() < least:
            return comm.all_to_all(flat, send, recv).split(sizes)
        got = x.new_empty(sum(recv))
        sent, arriving = [
            [(to, buffer) for to, buffer in enumerate(whole.split(each)) if buffer.numel()]
            for whole, each in ((flat, send), (got, recv))
        ]
        comm.swap(sent, arriving, x.dtype)()
        return got.split(sizes)

    if adds:
        join = _summed([*stays, *taken], wanted)
    else:
        beyond = [part(one, box) for one in outside(box, step.cover.inside_at(boxes, at))]
        join = joined([*stays, *taken], wanted, beyond, step.cover.fill)

    def run(x: Tensor) -> Tensor:
        got = [piece.view(shape) for piece, shape in zip(brought(x), shapes)]
        return join([*(cut(x) for cut in kept), *got], x)

    return run


def _summed(boxes: Sequence[Box], wanted: Box) -> Callable[[Sequence[Tensor], Tensor], Tensor]:
    """What adds up pieces with these boxes, in order; the first may be the whole."""
    shape, parts = shape_of(wanted), [part(one, wanted) for one in boxes]
    is_whole = bool(boxes) and boxes[0] == wanted

    def run(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
        if is_whole:
            out = pieces[0].clone(memory_format=torch.contiguous_format)
        else:
            out = like.new_zeros(shape)
        for cut, piece in [*zip(parts, pieces)][is_whole:]:
            cut(out).add_(piece)
        return out

    return run


def _home(box: Box, lengths: dict[int, int]) -> Box:
    """Where a box lies in a tensor of which these dims, of these lengths, are rings."""
    return tuple([
        (start, stop) if dim not in lengths
        else (start % lengths[dim], start % lengths[dim] + stop - start)
        for dim, (start, stop) in enumerate(box)
    ])
