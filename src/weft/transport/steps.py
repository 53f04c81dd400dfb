"""One step of a plan on one rank: what happens to the local tensor, worked out beforehand.

Which pieces of the tensor go where, and how received data becomes the new tensor, is a matter of
slices and sizes. At run time a few torch calls around the collective remain.

Pieces are sent in one of two ways. Either all go through one buffer, by one all-to-all. Or each
goes by itself, uncopied if it is contiguous, and is received in its final place, while what stays
on this rank is copied. The latter needs a backend that can do it (gloo). It takes less time for
many bytes; if most ranks of a group have nothing for each other, it does for any number, because an
all-to-all involves all of them. All ranks of a group choose alike: the choice depends on what the
whole step moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from weft.comm import BoundMesh, Communicator, Finish
from weft.core.layout import Box, Layout
from weft.planner import (
    IDEMPOTENT,
    LINEAR,
    AllGather,
    AllReduce,
    Exchange,
    Fetch,
    Fold,
    MakePartial,
    ReduceScatter,
    Slice,
    Step,
    Transfer,
    is_local,
    step_nbytes,
)
from weft.planner.geometry import Coordinate, intersect, size_over, volume
from weft.transport.boxes import Move, flat, pack, part, shape_of, stretch, unpack, within
from weft.transport.halos import halo_exchange, limit, weight

__all__ = ["Start", "compile_step", "compile_transfer", "partial_kind"]

Start = Callable[[Tensor], Finish]


def compile_step(step: Step, at: Coordinate, mesh: BoundMesh) -> tuple[Move, Start | None]:
    """What a step within one mesh does at a coordinate, and how to start it if that is possible."""
    held, wanted = step.src.box_at(at), step.dst.box_at(at)
    match step:
        case Slice():
            return _slice(held, wanted), None
        case Exchange() | AllGather():
            return _moved(step, at, mesh)
        case Fetch() | Fold():
            return halo_exchange(step, at, mesh), None
        case ReduceScatter():
            return _reduce_scatter(step, at, mesh)
        case AllReduce():
            return _all_reduce(step, mesh)
        case MakePartial():
            return _make_partial(step, at), None
        case Transfer():
            raise AssertionError("it has two meshes")
        case _:
            assert_never(step)


# Local steps.


def _slice(held: Box, wanted: Box) -> Move:
    shape = shape_of(wanted)
    if 0 in shape:
        return lambda x: x.new_empty(shape)
    where = within(wanted, held)
    return lambda x: _without_gaps(x[where])


def _without_gaps(x: Tensor) -> Tensor:
    """Contiguous; but dims that are expanded remain so, in a copy of what they repeat."""
    strides = x.stride()
    if 0 not in strides:
        return x.contiguous()
    once = x[tuple([slice(None) if step else slice(1) for step in strides])]
    return once.clone(memory_format=torch.contiguous_format).expand(x.shape)


def _make_partial(step: MakePartial, at: Coordinate) -> Move:
    """The value as this coordinate's partial value: zeros around a block, the identity
    elsewhere."""
    held, wanted = step.src.box_at(at), step.dst.box_at(at)
    kinds = {step.dst.partial[axis] for axis in step.axes}
    cut = step.src.sharded_axes
    keeps = kinds <= IDEMPOTENT or all(at[axis] == 0 for axis in step.axes if axis not in cut)
    shared = intersect(held, wanted) if keeps else None
    if shared == wanted:
        return _slice(held, wanted)
    shape = shape_of(wanted)
    if kinds == {"product"}:
        return lambda x: x.new_ones(shape)
    if shared is None:
        return lambda x: x.new_zeros(shape)
    source, target = within(shared, held), within(shared, wanted)

    def pad(x: Tensor) -> Tensor:
        out = x.new_zeros(shape)
        out[target] = x[source]
        return out

    return pad


# Steps that move boxes.


@dataclass(frozen=True, slots=True)
class _Boxes:
    """What one rank of a group sends and receives: boxes by position in the group.

    `held` and `wanted` are its boxes before and after. A rank of the group receives `mean` elements
    on average. Pieces travel by themselves from
    `weight` times the bytes on from which the communicator prefers that.
    """

    comm: Communicator
    sends: Mapping[int, Box]
    receives: Mapping[int, Box]
    held: Box
    wanted: Box
    mean: float
    weight: int


def _moved(step: Exchange | AllGather, at: Coordinate, mesh: BoundMesh) -> tuple[Move, Start]:
    comm = mesh.comm(step.axes)
    peers = step.src.mesh.along(step.axes, at)
    place = {peer: index for index, peer in enumerate(peers)}
    held, wanted = step.src.box_at(at), step.dst.box_at(at)
    mean = step_nbytes(step, 1) / step.src.mesh.size()
    receives = {place[peer]: box for peer, box in step.receives(at) if volume(box)}
    if isinstance(step, AllGather):
        sends = dict.fromkeys(place.values(), held) if volume(held) else {}
        boxes = _Boxes(comm, sends, receives, held, wanted, mean, 1)
        return _either(_gathered(boxes), boxes)
    sends = {place[peer]: box for peer, box in step.sends(at) if volume(box)}
    boxes = _Boxes(
        comm, sends, receives, held, wanted, mean, weight(_num_pieces(step), comm))
    return _either(_exchanged(boxes), boxes)


def _num_pieces(step: Exchange) -> float:
    """The number of pieces that form a target box, if lengths divide evenly."""
    counts = [[size_over(it, axes) for axes in it.dims] for it in (step.src, step.dst)]
    return math.prod(max(1.0, before / after) for before, after in zip(*counts))


def compile_transfer(
    step: Transfer, mesh: BoundMesh, target: BoundMesh
) -> tuple[Move, Start | None]:
    """What the step between two meshes does on this rank, which may be outside of either."""
    here, there = mesh.here, target.here
    nothing = ((0, 0),)  # the box of a rank outside
    held = nothing if here is None else step.src.box_at(here)
    wanted = nothing if there is None else step.dst.box_at(there)
    if here is None and there is None:
        return lambda x: x, None
    comm = mesh.world.across(mesh, target)
    place = {rank: index for index, rank in enumerate(comm.ranks)}
    boxes = _Boxes(
        comm,
        {place[rank]: box for rank, box in step.sends(mesh.rank)},
        {place[rank]: box for rank, box in step.receives(mesh.rank)},
        held, wanted, step_nbytes(step, 1) / comm.size, 0,
    )
    if comm.size == 1 or is_local(step):
        return _slice(held, wanted), None
    return _either(_exchanged(boxes), boxes)


def _either(buffered: Move, boxes: _Boxes) -> tuple[Move, Start]:
    """One buffer for little, piece by piece for much: the whole group alike."""
    start, mean, least = _piecewise(boxes), boxes.mean, limit(boxes.comm, boxes.weight)

    def run(x: Tensor) -> Tensor:
        if mean * x.element_size() < least:
            return buffered(x)
        return start(x)()

    return run, start


def _exchanged(boxes: _Boxes) -> Move:
    """Through one buffer, by one all-to-all."""
    comm, held, wanted = boxes.comm, boxes.held, boxes.wanted
    sent, got = dict(boxes.sends), dict(boxes.receives)
    own = sent.get(comm.index)
    # Where nothing would have to be packed or unpacked, what stays goes through the buffer as well,
    # unless that makes the buffer more than twice as large.
    spares = _whole(got, wanted) or (own and 2 * volume(own) <= volume(held) and _whole(sent, held))
    if own and not spares:
        del sent[comm.index], got[comm.index]  # what stays is copied from box to box
    else:
        own = None
    places = range(comm.size)
    send = [volume(sent[place]) if place in sent else 0 for place in places]
    recv = [volume(got[place]) if place in got else 0 for place in places]
    packed = pack([sent[place] for place in sorted(sent)], held)
    unpacked = unpack([got[place] for place in sorted(got)], wanted, own)
    if own is None:
        return lambda x: unpacked(comm.all_to_all(packed(x), send, recv), None)
    kept = within(own, held)
    return lambda x: unpacked(comm.all_to_all(packed(x), send, recv), x[kept])


def _whole(boxes: Mapping[int, Box], outer: Box) -> bool:
    return stretch([boxes[place] for place in sorted(boxes)], outer) == (0, volume(outer))


def _gathered(boxes: _Boxes) -> Move:
    """Through one buffer, by one all-gather."""
    comm, got = boxes.comm, boxes.receives
    sizes = [volume(got[place]) if place in got else 0 for place in range(comm.size)]
    unpacked = unpack([got[place] for place in sorted(got)], boxes.wanted, None)
    return lambda x: unpacked(comm.all_gather(flat(x), sizes), None)


def _piecewise(boxes: _Boxes) -> Start:
    """Each piece by itself, from its place in the source to its place in the target."""
    comm, held, wanted = boxes.comm, boxes.held, boxes.wanted
    shape = shape_of(wanted)
    others = [(comm.index + step) % comm.size for step in range(1, comm.size)]
    sends = [(to, part(boxes.sends[to], held)) for to in others if to in boxes.sends]
    receives = [
        (by, part(boxes.receives[by], wanted), stretch([boxes.receives[by]], wanted) is not None)
        for by in reversed(others) if by in boxes.receives
    ]
    kept = boxes.receives.get(comm.index)
    own = (part(kept, wanted), part(kept, held)) if kept else None

    def start(x: Tensor) -> Finish:
        out = x.new_empty(shape)
        recv, placed = [], []
        for by, cut, in_place in receives:
            piece = cut(out)
            if not in_place:
                piece, there = x.new_empty(piece.shape), piece
                placed.append((there, piece))
            recv.append((by, piece))
        wait = comm.swap([(to, cut(x).contiguous()) for to, cut in sends], recv, x.dtype)
        if own:
            own[0](out).copy_(own[1](x))

        def finish() -> Tensor:
            wait()
            for there, piece in placed:
                there.copy_(piece)
            return out

        return finish

    return start


# Steps that reduce.


def _reduce_scatter(step: ReduceScatter, at: Coordinate, mesh: BoundMesh) -> tuple[Move, Start]:
    boxes = [box for _, box in step.sends(at)]
    sizes = [volume(box) for box in boxes]
    packed = pack([box for box in boxes if volume(box)], step.src.box_at(at))
    shape = shape_of(step.dst.box_at(at))
    comm = mesh.comm(step.axes)
    kind, divisor = partial_kind(step.src, step.axes)

    def run(x: Tensor) -> Tensor:
        return divided(comm.reduce_scatter(packed(x), sizes, kind))

    def divided(total: Tensor) -> Tensor:
        total = total.view(shape)
        return total if divisor == 1 else total.div_(divisor)

    def start(x: Tensor) -> Finish:
        finish = comm.start_reduce_scatter(packed(x), sizes, kind)
        return lambda: divided(finish())

    return run, start


def _all_reduce(step: AllReduce, mesh: BoundMesh) -> tuple[Move, Start]:
    comm = mesh.comm(step.axes)
    kind, divisor = partial_kind(step.src, step.axes)

    def start(x: Tensor) -> Finish:
        finish = comm.start_all_reduce(x, kind)
        return finish if divisor == 1 else lambda: finish().div_(divisor)

    if divisor == 1:
        return lambda x: comm.all_reduce(x, kind), start
    return lambda x: comm.all_reduce(x, kind).div_(divisor), start


def partial_kind(layout: Layout, axes: tuple[int, ...]) -> tuple[str, int]:
    """The kind of one collective over several partial axes, and what to divide by after it."""
    kinds = {layout.partial[axis] for axis in axes}
    if len(kinds) == 1:
        return kinds.pop(), 1  # type: ignore[return-value]
    assert kinds <= LINEAR, f"{kinds} do not stand together"
    return "sum", size_over(layout, [axis for axis in axes if layout.partial[axis] == "avg"])
