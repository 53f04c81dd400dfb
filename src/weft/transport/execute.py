"""Runs a plan on one rank's local tensor.

A plan is *compiled* once per rank, step by step (`steps`). A run is then a few torch calls around
each collective.

A run may also be *started*: its last collective then proceeds while the program goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import BoundMesh, Communicator, Finish
from weft.planner import (
    AllReduce,
    Fetch,
    Fold,
    MakePartial,
    Plan,
    Slice,
    Step,
    Transfer,
    is_local,
    step_nbytes_at,
)
from weft.transport import traffic
from weft.transport.boxes import Move
from weft.transport.steps import Start, compile_step, compile_transfer, partial_kind

__all__ = ["CompiledPlan", "compile_plan", "owned", "unshared"]


@dataclass(frozen=True, slots=True)
class _Collective:
    """One collective of a step, as the traffic log gets it."""

    name: str
    axes: tuple[str, ...]
    elements: int  # received from others, as bytes of a one-byte dtype


class CompiledPlan:
    """A plan compiled for one rank: `run(local) -> local`.

    `aliases`: the result may be, or share memory with, the argument. `cuts`: it may be a view of
    more memory than it takes (see `owned`). `reduction`: communicator and kind, if the plan is one
    all-reduce and nothing else, so that several may be joined.
    """

    __slots__ = ("aliases", "collectives", "cuts", "moves", "reduction", "starts")

    def __init__(
        self,
        moves: Sequence[tuple[Move, Start | None]],
        collectives: Sequence[_Collective],
        reduction: tuple[Communicator, str] | None,
        cuts: bool,
    ) -> None:
        self.moves = tuple(move for move, _ in moves)
        self.starts = tuple(start for _, start in moves)
        self.collectives = tuple(collectives)
        self.aliases = not self.collectives
        self.cuts = cuts
        self.reduction = reduction

    def run(self, x: Tensor) -> Tensor:
        """The local tensor at the plan's target."""
        for move in self.moves:
            x = move(x)
        return x

    def start(self, x: Tensor) -> Finish:
        """Like `run`, but the last collective proceeds until the returned function is called.

        By then this rank has issued everything that other ranks wait for, so the function need not
        be called.
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

    def report(self, text: str, itemsize: int) -> None:
        """Report to the traffic log what a run of the transition `text` moves."""
        for it in self.collectives:
            traffic.emit(text, it.axes, it.name, it.elements * itemsize)


def unshared(out: Tensor, x: Tensor) -> Tensor:
    """`out`, copied if it shares memory with `x`."""
    mine, its = out.untyped_storage(), x.untyped_storage()
    address = mine.data_ptr()  # 0 of meta tensors, and where nothing is stored
    if address == its.data_ptr() and (address or mine._cdata == its._cdata):
        return out.clone(memory_format=torch.contiguous_format)
    return out


def owned(out: Tensor) -> Tensor:
    """`out`, copied if it is a view of more memory than it takes, so that it keeps no more alive,
    or of less, as expanded tensors are, so that each element has a place of its own.

    The gradient of the copy flows back like that of a view.
    """
    if 0 in out.stride():
        return out.clone(memory_format=torch.contiguous_format)
    if out.untyped_storage().nbytes() > out.numel() * out.element_size():
        return out.clone()
    return out


def compile_plan(plan: Plan, mesh: BoundMesh, target: BoundMesh) -> CompiledPlan:
    """The compiled plan of this rank. Every rank that takes part compiles it alike.

    A rank outside a mesh does nothing in the steps on that mesh.
    """
    moves: list[tuple[Move, Start | None]] = []
    collectives = []
    bound = mesh
    for step in plan.steps:
        if isinstance(step, Transfer):
            moves.append(compile_transfer(step, mesh, target))
            bound = target
        elif bound.here is not None:
            moves.append(compile_step(step, bound.here, bound))
        else:
            continue
        if not is_local(step):
            collectives.append(_told(step, bound))
    if plan.src.is_stretched or plan.dst.is_stretched:
        moves = _apart(plan, moves, mesh, target)
    cuts = any(isinstance(step, (Slice, MakePartial, Transfer)) for step in plan.steps)
    return CompiledPlan(moves, collectives, _reduction(plan, mesh), cuts)


def _apart(
    plan: Plan, moves: list[tuple[Move, Start | None]], mesh: BoundMesh, target: BoundMesh
) -> list[tuple[Move, Start | None]]:
    """The moves of steps that take dims in stretches as two: they get, and leave, them as one."""
    if plan.steps and mesh.here is not None:
        given = plan.steps[0].src.local_shape_at(mesh.here)
        moves = [(lambda x: x.reshape(given), None), *moves]
    if plan.steps and target.here is not None:
        made = plan.dst.local_shape_at(target.here)
        moves = [*moves, (lambda x: x.reshape(made), None)]
    return moves


def _told(step: Step, mesh: BoundMesh) -> _Collective:
    elements = 0 if mesh.here is None else step_nbytes_at(step, mesh.here, 1)
    return _Collective(_NAMES.get(type(step), type(step).__name__), step.names, elements)


_NAMES: dict[type, str] = {Fetch: "Halo", Fold: "HaloSum"}


def _reduction(plan: Plan, mesh: BoundMesh) -> tuple[Communicator, str] | None:
    if len(plan.steps) != 1 or not isinstance(plan.steps[0], AllReduce) or mesh.here is None:
        return None
    step = plan.steps[0]
    kind, divisor = partial_kind(step.src, step.axes)
    return (mesh.comm(step.axes), kind) if divisor == 1 else None
