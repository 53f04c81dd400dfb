"""A plan carried out on one rank's local tensor.

A plan is *compiled* once per rank: which pieces of the local tensor go where, and how what
arrives becomes the new local tensor, are worked out as slices and split sizes. A run is then a
few torch calls around each collective. A piece that lies in memory as it has to be sent is sent
as it lies, and what arrives in order is the result without being copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import Tensor

from weft.comm import BoundMesh, Communicator
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
    step_nbytes_at,
)
from weft.planner.geometry import Coordinate, group, intersect, size_over, volume
from weft.transport import traffic

__all__ = ["Program", "compile_plan", "execute", "unshared"]

Move = Callable[[Tensor], Tensor]

_KEPT = 4096
"""Compiled plans kept per rank."""


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

    __slots__ = ("aliases", "collectives", "moves", "reduction")

    def __init__(
        self,
        moves: Sequence[Move],
        collectives: Sequence[_Collective],
        reduction: tuple[Communicator, str] | None = None,
    ) -> None:
        self.moves = tuple(moves)
        self.collectives = tuple(collectives)
        self.aliases = not self.collectives
        self.reduction = reduction

    def run(self, x: Tensor) -> Tensor:
        """The local tensor at the plan's target."""
        for move in self.moves:
            x = move(x)
        return x

    def run_as(self, text: str, layouts: str, x: Tensor) -> Tensor:
        """`run`, told to the traffic log, and to the debug mode of collectives."""
        self.report(text, x.element_size())
        with traffic.moving(layouts if layouts == text else f"{text}: {layouts}"):
            return self.run(x)

    def report(self, text: str, itemsize: int) -> None:
        """Tell the traffic log what a run of the transition `text` moves."""
        for it in self.collectives:
            traffic.emit(text, it.axes, it.name, it.elements * itemsize)


def execute(plan: Plan, local: Tensor, mesh: BoundMesh, *, copy: bool = False) -> Tensor:
    """Carry out a plan: this rank's part at `plan.src` becomes its part at `plan.dst`.

    A rank outside the mesh gets its (empty) argument back. Not differentiable; a `Transition` is.

    Args:
        plan: any plan. local: this rank's part, of any strides. mesh: the plan's mesh, bound.
        copy: never share memory with `local`.
    """
    if mesh.here is None:
        return local.clone() if copy else local
    programs = mesh.cache.setdefault("transport.programs", {})
    program = programs.get(plan)
    if program is None:
        if len(programs) >= _KEPT:
            programs.clear()
        program = programs[plan] = compile_plan(plan, mesh)
    local = local.detach()
    text = f"{plan.src} -> {plan.dst}" if traffic.STATE.on else ""
    out = program.run_as(text, text, local) if text else program.run(local)
    return unshared(out, local) if copy and program.aliases else out


def unshared(out: Tensor, x: Tensor) -> Tensor:
    """`out`, copied where it shares memory with `x`."""
    if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return out.clone(memory_format=torch.contiguous_format)
    return out


def compile_plan(plan: Plan, mesh: BoundMesh) -> Program:
    """The program of a plan on this rank. Every rank of the mesh compiles it alike."""
    at = mesh.here
    assert at is not None, "a rank outside the mesh runs nothing"
    names = mesh.axis_names
    moves, collectives = [], []
    for step in plan.steps:
        moves.append(_compile(step, at, mesh))
        if not is_local(step):
            over = tuple(str(names[axis]) for axis in step.axes)
            elements = step_nbytes_at(step, at, 1)
            collectives.append(_Collective(type(step).__name__, over, elements))
    return Program(moves, collectives, _reduction(plan, mesh))


def _reduction(plan: Plan, mesh: BoundMesh) -> tuple[Communicator, str] | None:
    if len(plan.steps) != 1 or not isinstance(plan.steps[0], AllReduce):
        return None
    step = plan.steps[0]
    kind, divisor = _kind(step.src, step.axes)
    return (mesh.comm(step.axes), kind) if divisor == 1 else None


def _compile(step: Step, at: Coordinate, mesh: BoundMesh) -> Move:
    assert not isinstance(step, Transfer), "plan() stays on one mesh so far"
    held, wanted = step.src.box_at(at), step.dst.box_at(at)
    match step:
        case Slice():
            return _slice(held, wanted)
        case Exchange():
            return _exchange(step, at, mesh)
        case AllGather():
            return _all_gather(step, at, mesh)
        case ReduceScatter():
            return _reduce_scatter(step, at, mesh)
        case AllReduce():
            return _all_reduce(step, mesh)
        case Term():
            return _term(step, at)
        case _:
            assert_never(step)


# Local steps.


def _slice(held: Box, wanted: Box) -> Move:
    shape = _shape(wanted)
    if 0 in shape:
        return lambda x: x.new_empty(shape)
    where = _within(wanted, held)
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
    shape = _shape(wanted)
    if kinds == {"product"}:
        return lambda x: x.new_ones(shape)
    if shared is None:
        return lambda x: x.new_zeros(shape)
    source, target = _within(shared, held), _within(shared, wanted)

    def pad(x: Tensor) -> Tensor:
        out = x.new_zeros(shape)
        out[target] = x[source]
        return out

    return pad


# Steps that communicate.


def _exchange(step: Exchange, at: Coordinate, mesh: BoundMesh) -> Move:
    peers = group(step.src, step.axes, at)
    sent, got = dict(step.sends(at)), dict(step.receives(at))
    held, wanted = step.src.box_at(at), step.dst.box_at(at)
    own = sent.get(at)
    if own and not (_in_order(sent.values(), held) or _in_order(got.values(), wanted)):
        del sent[at], got[at]  # what stays here is copied from box to box, not through buffers
    else:
        own = None
    send = [volume(sent[peer]) if peer in sent else 0 for peer in peers]
    recv = [volume(got[peer]) if peer in got else 0 for peer in peers]
    pack = _pack(list(sent.values()), held)
    unpack = _unpack(list(got.values()), wanted, own)
    comm = mesh.comm(step.axes)
    if own is None:
        return lambda x: unpack(comm.all_to_all(pack(x), send, recv), None)
    kept = _within(own, held)
    return lambda x: unpack(comm.all_to_all(pack(x), send, recv), x[kept])


def _all_gather(step: AllGather, at: Coordinate, mesh: BoundMesh) -> Move:
    boxes = [box for _, box in step.receives(at)]
    sizes = [volume(box) for box in boxes]
    unpack = _unpack([box for box in boxes if volume(box)], step.dst.box_at(at), None)
    comm = mesh.comm(step.axes)
    return lambda x: unpack(comm.all_gather(_flat(x), sizes), None)


def _reduce_scatter(step: ReduceScatter, at: Coordinate, mesh: BoundMesh) -> Move:
    boxes = [box for _, box in step.sends(at)]
    sizes = [volume(box) for box in boxes]
    pack = _pack([box for box in boxes if volume(box)], step.src.box_at(at))
    shape = _shape(step.dst.box_at(at))
    comm = mesh.comm(step.axes)
    kind, divisor = _kind(step.src, step.axes)
    if divisor == 1:
        return lambda x: comm.reduce_scatter(pack(x), sizes, kind).view(shape)
    return lambda x: comm.reduce_scatter(pack(x), sizes, kind).view(shape).div_(divisor)


def _all_reduce(step: AllReduce, mesh: BoundMesh) -> Move:
    comm = mesh.comm(step.axes)
    kind, divisor = _kind(step.src, step.axes)
    if divisor == 1:
        return lambda x: comm.all_reduce(x, kind)
    return lambda x: comm.all_reduce(x, kind).div_(divisor)


def _kind(layout: Layout, axes: tuple[int, ...]) -> tuple[str, int]:
    """The kind of one collective over several partial axes, and what to divide by after it."""
    kinds = {layout.partial[axis] for axis in axes}
    if len(kinds) == 1:
        return kinds.pop(), 1  # type: ignore[return-value]
    assert kinds <= LINEAR, f"{kinds} do not stand together"
    return "sum", size_over(layout, [axis for axis in axes if layout.partial[axis] == "avg"])


# Boxes as slices of local tensors.


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer))


def _in_order(boxes: Any, whole: Box) -> bool:
    """Whether the boxes, one after the other, are `whole` as it lies in memory.

    They are boxes of one grid, so two of them are apart or equal: when each starts where those
    before it end, none can have a gap that another one would have to fill.
    """
    shape, at = _shape(whole), 0
    for box in boxes:
        start = 0
        for where, length in zip(_within(box, whole), shape):
            start = start * length + where.start
        if start != at:
            return False
        at += volume(box)
    return at == math.prod(shape)


def _flat(x: Tensor) -> Tensor:
    return x.contiguous().view(-1)


def _pack(boxes: list[Box], held: Box) -> Move:
    """From the local tensor to one flat buffer: the boxes, one after the other."""
    if _in_order(boxes, held):
        return _flat
    if not boxes:
        return lambda x: x.new_empty(0)
    places = [_within(box, held) for box in boxes]
    if len(places) == 1:
        (place,) = places
        return lambda x: x[place].contiguous().view(-1)
    return lambda x: torch.cat([x[place].reshape(-1) for place in places])


def _unpack(
    boxes: list[Box], wanted: Box, own: Box | None
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """From what arrived (the boxes, one after the other) and what stayed to the local tensor."""
    shape = _shape(wanted)
    if own is None and _in_order(boxes, wanted):
        return lambda got, kept: got.view(shape)
    sizes = [volume(box) for box in boxes]
    shapes = [_shape(box) for box in boxes]
    places = [_within(box, wanted) for box in ([*boxes, own] if own else boxes)]

    def pieces(got: Tensor, kept: Tensor | None) -> list[Tensor]:
        out = [piece.view(size) for piece, size in zip(got.split(sizes), shapes)]
        return out if kept is None else [*out, kept]

    varying = [dim for dim in range(len(shape)) if len({place[dim].start for place in places}) > 1]
    if len(varying) == 1:
        (dim,) = varying
        order = sorted(range(len(places)), key=lambda i: places[i][dim].start)

        def join(got: Tensor, kept: Tensor | None) -> Tensor:
            parts = pieces(got, kept)
            return torch.cat([parts[i] for i in order], dim)

        return join

    def fill(got: Tensor, kept: Tensor | None) -> Tensor:
        out = got.new_empty(shape)
        for place, piece in zip(places, pieces(got, kept)):
            out[place] = piece
        return out

    return fill
