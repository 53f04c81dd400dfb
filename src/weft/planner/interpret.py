"""Plans carried out on symbols, by brute force: the judge of what `search` finds.

Written apart from the search: it looks at boxes only, never at axes orders or cuts, and it lists
the whole mesh. A value is a linear combination of symbols (as counts): the symbol of element i at
a source that is partial over some axes is (i, the digits over them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import product
from math import prod

from weft.core.layout import Layout
from weft.core.mesh import AxisName
from weft.planner.check import IDEMPOTENT, LINEAR
from weft.planner.plan import Plan
from weft.planner.steps import (
    AllGather,
    AllReduce,
    Exchange,
    ReduceScatter,
    Slice,
    Step,
    Term,
    Transfer,
)

__all__ = ["PlanError", "interpret"]

Index = tuple[int, ...]
Symbols = Mapping[tuple[Index, Index], Fraction | int]
Held = dict[Index, Symbols]
World = dict[tuple[int, ...], Held]


class PlanError(AssertionError):
    """A plan that does not do what it says: a bug of the planner."""


def interpret(plan: Plan) -> World:
    """What each coordinate (of the target's mesh) holds after the plan: index -> symbols.

    A value is the combination of source symbols that stands at a global index.

    Raises:
        PlanError: a step whose precondition fails, steps that do not chain, or a result that is
            not the value that the source denotes.
    """
    world = {at: _source(plan.src, at) for at in _mesh(plan.src)}
    here = plan.src
    for step in plan.steps:
        _require(_alike(here, step.src), step, "follows", here)
        world = _run(step, world)
        here = step.dst
    _require(_alike(here, plan.dst), "the plan ends at", here, "not at", plan.dst)
    _judge(plan, world)
    return world


def _mesh(layout: Layout) -> Iterable[tuple[int, ...]]:
    return product(*map(range, layout.mesh.axis_sizes))


def _indices(layout: Layout, at: tuple[int, ...]) -> list[Index]:
    return list(product(*(range(*interval) for interval in layout.box_at(at))))


def _alike(left: Layout, right: Layout) -> bool:
    """Same boxes everywhere, same kinds on every axis of more than one device."""
    wide = [axis for axis, size in enumerate(left.mesh.axis_sizes) if size > 1]
    return (
        left.mesh == right.mesh
        and all(left.partial[axis] == right.partial[axis] for axis in wide)
        and all(left.box_at(at) == right.box_at(at) for at in _mesh(left))
    )


def _require(holds: bool, *what: object) -> None:
    if not holds:
        raise PlanError(" ".join(map(str, what)))


def _source(layout: Layout, at: tuple[int, ...]) -> Held:
    digits = tuple(digit for digit, kind in zip(at, layout.partial) if kind)
    return {index: {(index, digits): 1} for index in _indices(layout, at)}


def _members(layout: Layout, axes: Iterable[int], at: tuple[int, ...]) -> list[tuple[int, ...]]:
    axes = set(axes)
    return [
        other for other in _mesh(layout)
        if all(axis in axes or a == b for axis, (a, b) in enumerate(zip(at, other)))
    ]


def _reduce(layout: Layout, axes: Iterable[int], terms: list[Symbols]) -> Symbols:
    """Terms that stand on `axes` of a layout, reduced by the kinds of these axes."""
    kinds = {axis: layout.partial[axis] for axis in axes}
    mean = prod(layout.mesh.axis_sizes[axis] for axis, kind in kinds.items() if kind == "avg")
    out: dict[tuple[Index, Index], Fraction | int] = {}
    for term in terms:
        for symbol, count in term.items():
            out[symbol] = out.get(symbol, 0) + (count if mean == 1 else Fraction(count) / mean)
    family = next(iter(set(kinds.values()) - LINEAR), "sum")
    if family in IDEMPOTENT:
        return dict.fromkeys(out, 1)
    if family == "bxor":
        return {symbol: count for symbol, count in out.items() if count % 2}
    return out


def _run(step: Step, world: World) -> World:
    src, dst = step.src, step.dst
    if isinstance(step, Transfer):
        _require(0 in src.shape or _terms(src) == _terms(dst), step, "changes kinds")
        return _cross(step, world)
    _require(src.mesh == dst.mesh, step, "leaves its mesh")
    changed = {axis for axis, kind in enumerate(src.partial) if kind != dst.partial[axis]}
    if 0 not in src.shape:
        match step:
            case Slice() | Exchange() | AllGather():
                _require(not changed, step, "changes kinds")
            case ReduceScatter() | AllReduce():
                gone = all(src.partial[axis] and not dst.partial[axis] for axis in changed)
                _require(changed == set(step.axes) and gone, step, "reduces", changed)
            case Term():
                _require(changed == set(step.axes), step, "makes", changed, "partial")
                return {at: _term(step, at, world) for at in world}
    return {at: _arrive(step, at, world) for at in world}


def _arrive(step: Step, at: tuple[int, ...], world: World) -> Held:
    wanted = _indices(step.dst, at)
    members = _members(step.src, step.axes, at)
    match step:
        case Slice():
            _require(all(index in world[at] for index in wanted), step, "at", at, "lacks data")
            return {index: world[at][index] for index in wanted}
        case ReduceScatter() | AllReduce():
            return {
                index: _reduce(step.src, step.axes, [world[peer][index] for peer in members])
                for index in wanted
            }
        case _:
            held = {index: world[peer][index] for peer in members for index in world[peer]}
            _require(all(index in held for index in wanted), step, "at", at, "lacks data")
            _require(_views_agree(step, at), "the two sides of", step, "disagree at", at)
            return {index: world[at].get(index, held[index]) for index in wanted}


def _terms(layout: Layout) -> set[tuple[object, int, str]]:
    """Name, size and kind of every axis of terms."""
    mesh = layout.mesh
    axes = zip(mesh.axis_names, mesh.axis_sizes, layout.partial)
    return {(name, size, kind) for name, size, kind in axes if kind and size > 1}


def _cross(step: Transfer, world: World) -> World:
    """What the devices of the target's mesh get; none takes what it holds."""
    src, dst = step.src, step.dst
    places = {src.mesh.rank_at(src.mesh.position(at)): at for at in world}
    takers = {dst.mesh.rank_at(dst.mesh.position(at)): at for at in _mesh(dst)}
    received = {rank: step.receives(rank) for rank in takers}
    moved = {(holder, rank, box) for rank, got in received.items() for holder, box in got}
    sent = {(rank, taker, box) for rank in places for taker, box in step.sends(rank)}
    _require(moved == sent, step, ": the two sides disagree on", moved ^ sent)
    after: World = {}
    for rank, at in takers.items():
        holders = [holder for holder, _ in received[rank]]
        _require(holders == sorted(set(holders)), step, ":", rank, "takes from", holders)
        held: Held = after.setdefault(at, {})
        mine = places.get(rank)
        own = world[mine] if mine is not None and _same_term(step, at, mine) else {}
        for holder, box in received[rank]:
            there = places[holder]
            _require(_same_term(step, at, there), step, ":", rank, "takes another term")
            for index in product(*(range(*pair) for pair in box)):
                _require(index not in held, step, ":", rank, "gets", index, "twice")
                _require(holder == rank or index not in own, step, ":", rank, "has", index)
                held[index] = world[there][index]
        _require(sorted(held) == _indices(dst, at), step, ":", rank, "lacks data")
    return after


def _same_term(step: Transfer, at: tuple[int, ...], there: tuple[int, ...]) -> bool:
    """Whether coordinates of the two meshes stand for one term of the reductions that remain."""
    sides: list[dict[AxisName, int]] = []
    for layout, place in ((step.dst, at), (step.src, there)):
        axes = zip(layout.mesh.axis_names, place, layout.partial)
        sides.append({name: digit for name, digit, kind in axes if kind})
    return sides[0] == sides[1]


def _views_agree(step: Step, at: tuple[int, ...]) -> bool:
    """What a coordinate receives covers its box once, and is what the holders send."""
    if not isinstance(step, (Exchange, AllGather)):
        return True
    blocks = step.receives(at)
    covered = [i for _, box in blocks for i in product(*(range(*pair) for pair in box))]
    if sorted(covered) != _indices(step.dst, at):
        return False
    if isinstance(step, AllGather):
        return True
    return all((at, box) in step.sends(peer) for peer, box in blocks) and all(
        (at, box) in step.receives(taker) for taker, box in step.sends(at)
    )


def _term(step: Term, at: tuple[int, ...], world: World) -> Held:
    """Zeros around what is held, on the coordinate that keeps it."""
    kinds = {step.dst.partial[axis] for axis in step.axes}
    same = kinds <= IDEMPOTENT
    cut = {axis for axes in step.src.dims for axis in axes}
    _require(kinds <= {"sum"} or not cut & set(step.axes), step, "pads a kind that is not sum")
    keeps = same or all(at[axis] == 0 for axis in step.axes if axis not in cut)
    return {
        index: world[at].get(index, {}) if keeps else {} for index in _indices(step.dst, at)
    }


def _judge(plan: Plan, world: World) -> None:
    """The terms of the target, reduced, are the terms of the source, reduced."""
    src, dst = plan.src, plan.dst
    terms = [axis for axis, kind in enumerate(src.partial) if kind]
    made = [axis for axis, kind in enumerate(dst.partial) if kind]
    digits = list(product(*(range(src.mesh.axis_sizes[axis]) for axis in terms)))
    expected = {
        index: _reduce(src, terms, [{(index, d): 1} for d in digits])
        for index in {index for held in world.values() for index in held}
    }
    judged: set[tuple[int, ...]] = set()
    for at, held in world.items():
        if at in judged:
            continue
        members = _members(dst, made, at)
        judged.update(members)  # terms of one value lie in boxes alike
        for index in held:
            found = _reduce(dst, made, [world[member][index] for member in members])
            _require(found == expected[index], plan.src, "->", plan.dst, ":", index, "at", at,
                     "is", found)
