"""Halos on one rank: what ranks read of others' shards, and its transpose.

Who sends what to whom is in the step (`Fetch`, `Fold`). Those of dims that are rings are carried
out here: a piece may stand at several places of a box, and a rank may be its own neighbour on both
sides. Other halos are fetched as boxes move between layouts (`steps`), and summed here.
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
from weft.planner.geometry import Coordinate, group, volume
from weft.transport.boxes import Move, pack, part, shape_of

__all__ = ["DENSE", "filling", "folded", "group_of", "limit", "outside", "round_a_ring", "weight"]

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
    return mesh.comm(axes), {peer: at for at, peer in enumerate(group(step.src, axes, at))}


def weight(step: Fetch | Fold, comm: Communicator) -> int:
    """As of an exchange: a halo comes from the shards on both sides in each dim that is read."""
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
    """From how many bytes on pieces travel by themselves."""
    least = comm.swaps_from_nbytes
    return least if least == math.inf else least * weight


def folded(step: Fold, at: Coordinate, mesh: BoundMesh) -> Move:
    """Parts of boxes go to their owners, who sum them in the order of the group."""
    if step.cover.rings:
        return round_a_ring(step, at, mesh)
    comm, place = group_of(step, at, mesh)
    held, wanted = step.cover.box_at(step.src, at), step.dst.box_at(at)
    sends = {place[peer]: box for peer, box in step.sends(at)}
    receives = {place[peer]: box for peer, box in step.receives(at)}
    kept, shape = sends.pop(comm.index, None), shape_of(wanted)
    receives.pop(comm.index, None)
    given = [(to, part(sends[to], held)) for to in sorted(sends)]
    parts = [(by, shape_of(receives[by]), part(receives[by], wanted)) for by in sorted(receives)]
    own = (part(kept, held), part(kept, wanted)) if kept else None
    send, recv = [[volume(its[to]) if to in its else 0 for to in range(comm.size)]
                  for its in (sends, receives)]
    packed = pack([sends[to] for to in sorted(sends)], held)
    mean = step_nbytes(step, 1) / step.src.mesh.size()
    least, sizes = limit(comm, weight(step, comm)), [math.prod(shape) for _, shape, _ in parts]

    def brought(x: Tensor) -> list[Tensor]:
        if mean * x.element_size() < least:
            got = comm.all_to_all(packed(x), send, recv).split(sizes)
            return [piece.view(shape) for piece, (_, shape, _) in zip(got, parts)]
        pieces = [(by, x.new_empty(shape)) for by, shape, _ in parts]
        comm.swap([(to, cut(x).contiguous()) for to, cut in given], pieces, x.dtype)()
        return [piece for _, piece in pieces]

    def run(x: Tensor) -> Tensor:
        pieces = brought(x)
        if kept == wanted and own is not None:
            out = own[0](x).clone(memory_format=torch.contiguous_format)
        else:
            out = x.new_zeros(shape)
            if own is not None:
                own[1](out).copy_(own[0](x))
        for piece, (_, _, cut) in zip(pieces, parts):
            cut(out).add_(piece)
        return out

    return run


def round_a_ring(step: Fetch | Fold, at: Coordinate, mesh: BoundMesh) -> Move:
    """A halo of which some dims are rings: each rank sends one buffer to each other that it has
    something for; in a sum, pieces are added in the order of the group."""
    comm, place = group_of(step, at, mesh)
    boxes, adds = (step.dst, False) if isinstance(step, Fetch) else (step.src, True)
    box = step.cover.box_at(boxes, at)
    own = (step.dst if adds else step.src).box_at(at)
    lengths = {dim: boxes.shape[dim] for dim in step.cover.rings}

    def cuts(blocks: Sequence[tuple[Coordinate, Box]], of_box: bool) -> dict[int, list[Any]]:
        """Per rank, the shapes of pieces of the box or of what this rank owns, and their places."""
        found: dict[int, list[Any]] = {}
        for peer, piece in blocks:
            where = piece if of_box else _home(piece, lengths)
            cut = part(where, box if of_box else own)
            found.setdefault(place[peer], []).append((shape_of(where), cut))
        return found

    sends, receives = cuts(step.sends(at), adds), cuts(step.receives(at), not adds)
    shape = shape_of(own if adds else box)
    places = range(comm.size)
    send, recv = [
        [0 if to == comm.index else sum(math.prod(size) for size, _ in its.get(to, ()))
         for to in places] for its in (sends, receives)
    ]
    beyond = () if adds else outside(box, step.cover.inside_at(boxes, at))
    filled = filling([part(one, box) for one in beyond], step.cover.fill)
    mean = step_nbytes(step, 1) / step.src.mesh.size()
    least = limit(comm, weight(step, comm))

    def packed(x: Tensor, to: int) -> Tensor:
        pieces = [cut(x).reshape(-1) for _, cut in sends.get(to, ())]
        return torch.cat(pieces) if pieces else x.new_empty(0)

    def brought(x: Tensor) -> list[Tensor]:
        """One buffer from each rank, this one included."""
        buffers = [packed(x, to) for to in places]
        kept, buffers[comm.index] = buffers[comm.index], x.new_empty(0)
        if mean * x.element_size() < least:
            got = [*comm.all_to_all(torch.cat(buffers), send, recv).split(recv)]
        else:
            got = [x.new_empty(size) for size in recv]
            comm.swap([(to, buffers[to]) for to in places if send[to]],
                      [(by, got[by]) for by in places if recv[by]], x.dtype)()
        got[comm.index] = kept
        return got

    def run(x: Tensor) -> Tensor:
        got = brought(x)
        out = x.new_zeros(shape) if adds else x.new_empty(shape)
        filled(out)
        for by, buffer in enumerate(got):
            its = receives.get(by, ())
            for piece, (size, cut) in zip(
                buffer.split([math.prod(size) for size, _ in its]) if its else (), its
            ):
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
