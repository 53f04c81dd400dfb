"""A plan carried out on one rank's local tensor.

A plan is *compiled* once per rank: which pieces of the local tensor go where, and how what
arrives becomes the new local tensor, are worked out as slices and sizes. A run is then a few
torch calls around each collective.

Pieces travel in one of two ways: all through one buffer, by one all-to-all; or each by itself, as
they lie in memory where they lie without gaps, received where they have to lie, while what stays
on this rank is copied. Where a backend can do the latter (gloo), it takes less time for many bytes,
and for any where most ranks of a group have nothing for each other, because an all-to-all bothers
all of them. All ranks of a group choose alike: the choice depends on what the whole step moves.

A run may also be *started*: its last collective is then under way while the program goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor
from torch._C import _DisableAutocast  # type: ignore[attr-defined]

from weft.comm import BoundMesh, Communicator, Finish
from weft.core.layout import Box, Layout
from weft.planner import (
    IDEMPOTENT,
    LINEAR,
    AllGather,
    AllReduce,
    Exchange,
    Plan,
    ReduceScatter,
    Slice,
    Step,
    Term,
    Transfer,
    is_local,
    step_nbytes,
    step_nbytes_at,
)
from weft.planner.geometry import Coordinate, group, intersect, size_over, volume
from weft.transport import traffic
from weft.transport.boxes import Move, flat, pack, part, shape_of, stretch, unpack, within

__all__ = ["Program", "compile_plan", "execute", "unshared"]

Start = Callable[[Tensor], Finish]

_KEPT = 4096
"""Compiled plans kept per rank."""

_DENSE = 128
"""An all-to-all starts what a rank has for all others at once, and copies no more than messages do:
where most have something for each other, messages pay from so many times the bytes on."""


@dataclass(frozen=True, slots=True)
class _Collective:
    """What a step tells the traffic log."""

    name: str
    axes: tuple[str, ...]
    elements: int  # received from others, as bytes of a one-byte dtype


class Program:
    """A plan compiled for one rank: `run(local) -> local`.

    `aliases`: the result may be, or share memory with, the argument. `reduction`: communicator
    and kind, where the program is one all-reduce and nothing else, so that several may join.
    """

    __slots__ = ("aliases", "collectives", "moves", "reduction", "starts")

    def __init__(
        self,
        moves: Sequence[tuple[Move, Start | None]],
        collectives: Sequence[_Collective],
        reduction: tuple[Communicator, str] | None = None,
    ) -> None:
        self.moves = tuple(move for move, _ in moves)
        self.starts = tuple(start for _, start in moves)
        self.collectives = tuple(collectives)
        self.aliases = not self.collectives
        self.reduction = reduction

    def run(self, x: Tensor) -> Tensor:
        """The local tensor at the plan's target."""
        for move in self.moves:
            x = move(x)
        return x

    def start(self, x: Tensor) -> Finish:
        """`run`, of which the last collective is under way until the result is called.

        All that other ranks wait for has been issued by then: nobody has to call it.
        """
        last = max((at for at, start in enumerate(self.starts) if start is not None), default=-1)
        for move in self.moves[: max(last, 0)]:
            x = move(x)
        start = self.starts[last] if last >= 0 else None
        if start is None:
            done = self.run(x)
            return lambda: done
        finish, rest = start(x), self.moves[last + 1 :]

        def finished() -> Tensor:
            out = finish()
            for move in rest:
                out = move(out)
            return out

        return finished

    def run_as(self, text: str, layouts: str, x: Tensor) -> Tensor:
        """`run`, told to the traffic log, and to the debug mode of collectives."""
        self.report(text, x.element_size())
        with traffic.moving(layouts if layouts == text else f"{text}: {layouts}"):
            return self.run(x)

    def start_as(self, text: str, layouts: str, x: Tensor) -> Finish:
        """`start`, told likewise."""
        self.report(text, x.element_size())
        with traffic.moving(f"{text}: {layouts}"):
            return self.start(x)

    def report(self, text: str, itemsize: int) -> None:
        """Tell the traffic log what a run of the transition `text` moves."""
        for it in self.collectives:
            traffic.emit(text, it.axes, it.name, it.elements * itemsize)


def execute(
    plan: Plan, local: Tensor, mesh: BoundMesh, target: BoundMesh | None = None, *,
    copy: bool = False,
) -> Tensor:
    """Carry out a plan: this rank's part at `plan.src` becomes its part at `plan.dst`.

    A rank outside the mesh gets its (empty) argument back; between two meshes, one outside the
    target's gets an empty one. Not differentiable; a `Transition` is.

    Args:
        plan: any plan. local: this rank's part, of any strides. mesh: the source's mesh, bound.
        target: the target's mesh, bound, where it is another one.
        copy: never share memory with `local`.
    """
    programs = mesh.cache.setdefault("transport.programs", {})
    program = programs.get(plan)
    if program is None:
        if len(programs) >= _KEPT:
            programs.clear()
        program = programs[plan] = compile_plan(plan, mesh, target)
    local = local.detach()
    text = f"{plan.src} -> {plan.dst}" if traffic.STATE.on else ""
    with _DisableAutocast():
        out = program.run_as(text, text, local) if text else program.run(local)
    return unshared(out, local) if copy and program.aliases else out


def unshared(out: Tensor, x: Tensor) -> Tensor:
    """`out`, copied where it shares memory with `x`."""
    if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return out.clone(memory_format=torch.contiguous_format)
    return out


def compile_plan(plan: Plan, mesh: BoundMesh, target: BoundMesh | None = None) -> Program:
    """The program of a plan on this rank. Every rank that takes part compiles it alike.

    A rank outside a mesh does nothing where that mesh works.
    """
    moves: list[tuple[Move, Start | None]] = []
    collectives = []
    bound = mesh
    for step in plan.steps:
        if isinstance(step, Transfer):
            assert target is not None, f"{step} leads to a mesh that is not given"
            moves.append(_transfer(step, mesh, target))
            bound = target
        elif bound.here is not None:
            moves.append(_compile(step, bound.here, bound))
        else:
            continue
        if not is_local(step):
            collectives.append(_told(step, bound))
    return Program(moves, collectives, _reduction(plan, mesh))


def _told(step: Step, mesh: BoundMesh) -> _Collective:
    names = step.src.mesh.axis_names
    over = tuple(str(names[axis]) for axis in step.axes)
    elements = 0 if mesh.here is None else step_nbytes_at(step, mesh.here, 1)
    return _Collective(type(step).__name__, over, elements)


def _reduction(plan: Plan, mesh: BoundMesh) -> tuple[Communicator, str] | None:
    if len(plan.steps) != 1 or not isinstance(plan.steps[0], AllReduce) or mesh.here is None:
        return None
    step = plan.steps[0]
    kind, divisor = _kind(step.src, step.axes)
    return (mesh.comm(step.axes), kind) if divisor == 1 else None


def _compile(step: Step, at: Coordinate, mesh: BoundMesh) -> tuple[Move, Start | None]:
    held, wanted = step.src.box_at(at), step.dst.box_at(at)
    match step:
        case Slice():
            return _slice(held, wanted), None
        case Exchange() | AllGather():
            return _moved(step, at, mesh)
        case ReduceScatter():
            return _reduce_scatter(step, at, mesh)
        case AllReduce():
            return _all_reduce(step, mesh)
        case Term():
            return _term(step, at), None
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
    return lambda x: x[where].contiguous()


def _term(step: Term, at: Coordinate) -> Move:
    """The value as this coordinate's term: zeros around what is held, the identity elsewhere."""
    held, wanted = step.src.box_at(at), step.dst.box_at(at)
    kinds = {step.dst.partial[axis] for axis in step.axes}
    cut = {axis for axes in step.src.dims for axis in axes}
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
    """What one rank of a group sends and receives: boxes by place in the group.

    `held` and `wanted` are its boxes before and after. `mean` elements are received by a rank of
    the group on average. They go each by itself from so many bytes on: `weight` times those from
    which the communicator prefers it.
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
    peers = group(step.src, step.axes, at)
    place = {peer: index for index, peer in enumerate(peers)}
    held, wanted = step.src.box_at(at), step.dst.box_at(at)
    mean = step_nbytes(step, 1) / step.src.mesh.size()
    receives = {place[peer]: box for peer, box in step.receives(at) if volume(box)}
    if isinstance(step, AllGather):
        sends = dict.fromkeys(place.values(), held) if volume(held) else {}
        boxes = _Boxes(comm, sends, receives, held, wanted, mean, 1)
        return _either(_gathered(boxes), boxes)
    sends = {place[peer]: box for peer, box in step.sends(at) if volume(box)}
    weight = _DENSE if 2 * _num_pieces(step) > comm.size else 0
    boxes = _Boxes(comm, sends, receives, held, wanted, mean, weight)
    return _either(_exchanged(boxes), boxes)


def _num_pieces(step: Exchange) -> float:
    """Of how many pieces a target box is made up, where lengths divide evenly."""
    counts = [[size_over(it, axes) for axes in it.dims] for it in (step.src, step.dst)]
    return math.prod(max(1.0, before / after) for before, after in zip(*counts))


def _transfer(step: Transfer, mesh: BoundMesh, target: BoundMesh) -> tuple[Move, Start | None]:
    here, there = mesh.here, target.here
    nothing = ((0, 0),)  # what a rank outside holds
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
    start, mean, limit = _piecewise(boxes), boxes.mean, boxes.comm.swaps_from_nbytes
    limit = limit if limit == math.inf else limit * boxes.weight

    def run(x: Tensor) -> Tensor:
        if mean * x.element_size() < limit:
            return buffered(x)
        return start(x)()

    return run, start


def _exchanged(boxes: _Boxes) -> Move:
    """Through one buffer, by one all-to-all."""
    comm, held, wanted = boxes.comm, boxes.held, boxes.wanted
    sent, got = dict(boxes.sends), dict(boxes.receives)
    own = sent.get(comm.index)
    if own and not (_whole(sent, held) or _whole(got, wanted)):
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
    """Each piece by itself, from where it lies to where it has to lie."""
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
    kind, divisor = _kind(step.src, step.axes)

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
    kind, divisor = _kind(step.src, step.axes)

    def start(x: Tensor) -> Finish:
        finish = comm.start_all_reduce(x, kind)
        return finish if divisor == 1 else lambda: finish().div_(divisor)

    if divisor == 1:
        return lambda x: comm.all_reduce(x, kind), start
    return lambda x: comm.all_reduce(x, kind).div_(divisor), start


def _kind(layout: Layout, axes: tuple[int, ...]) -> tuple[str, int]:
    """The kind of one collective over several partial axes, and what to divide by after it."""
    kinds = {layout.partial[axis] for axis in axes}
    if len(kinds) == 1:
        return kinds.pop(), 1  # type: ignore[return-value]
    assert kinds <= LINEAR, f"{kinds} do not stand together"
    return "sum", size_over(layout, [axis for axis in axes if layout.partial[axis] == "avg"])
