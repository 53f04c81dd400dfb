"""Plans carried out on symbols, by brute force: the judge of what `search` finds.

Written independently of the search: it looks only at boxes, never at orders of axes or cuts, and it
lists the whole mesh. A value is a linear combination of symbols (as counts): the symbol of element
i at a source that is partial over some axes is (i, the digits over them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import product
from math import prod

from weft.core.cover import Cover
from weft.core.layout import Layout
from weft.core.mesh import AxisName
from weft.planner import (
    IDEMPOTENT,
    LINEAR,
    AllGather,
    AllReduce,
    Exchange,
    Fetch,
    Fold,
    MakePartial,
    Plan,
    ReduceScatter,
    Slice,
    Step,
    Transfer,
)

__all__ = ["PlanError", "interpret"]

Index = tuple[int, ...]
Symbols = Mapping[tuple[Index, Index], Fraction | int]
Held = dict[Index, Symbols]
World = dict[tuple[int, ...], Held]


class PlanError(AssertionError):
    """A plan that does not do what it states: a bug of the planner."""


def interpret(plan: Plan) -> World:
    """What each coordinate (of the target's mesh) holds after the plan: index -> symbols.

    A value is the combination of source symbols at a global index.

    Raises:
        PlanError: a step whose precondition fails, steps that do not chain, or a result that is
            not the value that the source denotes.
    """
    world = {at: _source(plan.src, at, plan.folds) for at in _mesh(plan.src)}
    here = plan.src
    for step in plan.steps:
        _require(_alike(here, step.src), step, "follows", here)
        world = _run(step, world)
        here = step.dst
    _require(_alike(here, plan.dst), "the plan ends at", here, "not at", plan.dst)
    if plan.cover is not None:
        _judge_boxes(plan, plan.cover, world)
    elif plan.folds is not None:
        _judge_sums(plan, plan.folds, world)
        return world
    _judge(plan, world)
    return world


def _mesh(layout: Layout) -> Iterable[tuple[int, ...]]:
    return product(*map(range, layout.mesh.axis_sizes))


def _indices(layout: Layout, at: tuple[int, ...]) -> list[Index]:
    return list(product(*(range(*interval) for interval in layout.box_at(at))))


def _read(layout: Layout, cover: Cover, at: tuple[int, ...]) -> list[Index]:
    """The places of the box that a coordinate reads, filled ones included."""
    return list(product(*(range(*interval) for interval in cover.box_at(layout, at))))


def _home(layout: Layout, cover: Cover, index: Index) -> Index | None:
    """Which place of the tensor stands at a place of a box; None where the box is filled."""
    home = tuple([
        place % length if dim in cover.rings else place
        for dim, (place, length) in enumerate(zip(index, layout.shape))
    ])
    return home if all(0 <= at < length for at, length in zip(home, layout.shape)) else None


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


def _source(layout: Layout, at: tuple[int, ...], folds: Cover | None) -> Held:
    if folds is not None:  # each rank's box is partial: its symbols are its own
        return {index: {(index, at): 1} for index in _read(layout, folds, at)}
    digits = tuple(digit for digit, kind in zip(at, layout.partial) if kind)
    return {index: {(index, digits): 1} for index in _indices(layout, at)}


def _members(layout: Layout, axes: Iterable[int], at: tuple[int, ...]) -> list[tuple[int, ...]]:
    axes = set(axes)
    return [
        other for other in _mesh(layout)
        if all(axis in axes or a == b for axis, (a, b) in enumerate(zip(at, other)))
    ]


def _reduce(layout: Layout, axes: Iterable[int], terms: list[Symbols]) -> Symbols:
    """Partial values over `axes` of a layout, reduced by the kinds of these axes."""
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
            case Slice() | Exchange() | AllGather() | Fetch() | Fold():
                _require(not changed, step, "changes kinds")
            case ReduceScatter() | AllReduce():
                gone = all(src.partial[axis] and not dst.partial[axis] for axis in changed)
                _require(changed == set(step.axes) and gone, step, "reduces", changed)
            case MakePartial():
                _require(changed == set(step.axes), step, "makes", changed, "partial")
                return {at: _term(step, at, world) for at in world}
    return {at: _arrive(step, at, world) for at in world}


def _arrive(step: Step, at: tuple[int, ...], world: World) -> Held:
    if isinstance(step, Fetch):
        return _fetch(step, at, world)
    if isinstance(step, Fold):
        return _fold(step, at, world)
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


def _fetch(step: Fetch, at: tuple[int, ...], world: World) -> Held:
    """Places of the tensor come from members of the group that own them; others are filled."""
    wanted = _read(step.dst, step.cover, at)
    homes = {index: _home(step.dst, step.cover, index) for index in wanted}
    inside = [index for index in wanted if homes[index] is not None]
    members = _members(step.src, step.axes, at)
    held = {index: world[peer][index] for peer in members for index in world[peer]}
    _require(all(homes[index] in held for index in inside), step, "at", at, "lacks data")
    blocks = step.receives(at)
    covered = [i for _, box in blocks for i in product(*(range(*pair) for pair in box))]
    _require(sorted(covered) == inside and _agree(step, at), step, "disagrees at", at)
    held |= world[at]
    return {index: {} if home is None else held[home] for index, home in homes.items()}


def _fold(step: Fold, at: tuple[int, ...], world: World) -> Held:
    """The sum of what members of the group hold of a place, each adding what it says it sends."""
    out: Held = {}
    parts = [(peer, set(product(*(range(*pair) for pair in box))))
             for peer, box in step.receives(at)]
    members = set(_members(step.src, step.axes, at))
    _require(_agree(step, at) and members.issuperset(peer for peer, _ in parts), step,
             "disagrees at", at)
    for index in _indices(step.dst, at):
        total: dict[tuple[Index, Index], Fraction | int] = {}
        for peer, places in parts:
            for place in places:
                if _home(step.dst, step.cover, place) == index:
                    for symbol, count in world[peer][place].items():
                        total[symbol] = total.get(symbol, 0) + count
        out[index] = total
    return out


def _agree(step: Exchange | Fetch | Fold, at: tuple[int, ...]) -> bool:
    """Whether both sides of what a coordinate exchanges say the same."""
    return all((at, box) in step.sends(peer) for peer, box in step.receives(at)) and all(
        (at, box) in step.receives(taker) for taker, box in step.sends(at)
    )


def _terms(layout: Layout) -> set[tuple[object, int, str]]:
    """Name, size and kind of every partial axis."""
    mesh = layout.mesh
    axes = zip(mesh.axis_names, mesh.axis_sizes, layout.partial)
    return {(name, size, kind) for name, size, kind in axes if kind and size > 1}


def _cross(step: Transfer, world: World) -> World:
    """What the devices of the target's mesh receive; none receives what it already holds."""
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
            _require(_same_term(step, at, there), step, ":", rank, "takes another partial value")
            for index in product(*(range(*pair) for pair in box)):
                _require(index not in held, step, ":", rank, "gets", index, "twice")
                _require(holder == rank or index not in own, step, ":", rank, "has", index)
                held[index] = world[there][index]
        _require(sorted(held) == _indices(dst, at), step, ":", rank, "lacks data")
    return after


def _same_term(step: Transfer, at: tuple[int, ...], there: tuple[int, ...]) -> bool:
    """Whether coordinates of the two meshes hold the same partial value of the remaining
    reductions."""
    sides: list[dict[AxisName, int]] = []
    for layout, place in ((step.dst, at), (step.src, there)):
        axes = zip(layout.mesh.axis_names, place, layout.partial)
        sides.append({name: digit for name, digit, kind in axes if kind})
    return sides[0] == sides[1]


def _views_agree(step: Step, at: tuple[int, ...]) -> bool:
    """Whether what a coordinate receives covers its box once and equals what the holders send."""
    if not isinstance(step, (Exchange, AllGather)):
        return True
    blocks = step.receives(at)
    covered = [i for _, box in blocks for i in product(*(range(*pair) for pair in box))]
    if sorted(covered) != _indices(step.dst, at):
        return False
    if isinstance(step, AllGather):
        return True
    return _agree(step, at)


def _term(step: MakePartial, at: tuple[int, ...], world: World) -> Held:
    """Zeros around the held block, on the coordinate that keeps it."""
    kinds = {step.dst.partial[axis] for axis in step.axes}
    same = kinds <= IDEMPOTENT
    cut = {axis for axes in step.src.dims for axis in axes}
    _require(kinds <= {"sum"} or not cut & set(step.axes), step, "pads a kind that is not sum")
    keeps = same or all(at[axis] == 0 for axis in step.axes if axis not in cut)
    return {
        index: world[at].get(index, {}) if keeps else {} for index in _indices(step.dst, at)
    }


def _judge_boxes(plan: Plan, cover: Cover, world: World) -> None:
    """Each rank holds its box; filled places hold nothing, and are left out from here on."""
    for at, held in world.items():
        _require(sorted(held) == _read(plan.dst, cover, at), plan.dst, "at", at, "is no box")
        outside = [index for index in held if _home(plan.dst, cover, index) is None]
        _require(not any(held[index] for index in outside), at, "is not filled")
        found: Held = {}
        for index in sorted(set(held) - set(outside)):
            home = _home(plan.dst, cover, index)
            assert home is not None
            _require(found.setdefault(home, held[index]) == held[index], at, "has two values")
        world[at] = found


def _judge_sums(plan: Plan, folds: Cover, world: World) -> None:
    """Each owner holds the sum of what all ranks held, those of one replica taking turns."""
    src, dst = plan.src, plan.dst
    counted = {axis for axes in src.dims for axis in axes}
    counted |= {axis for axis, kind in enumerate(src.partial) if kind and not dst.partial[axis]}
    for at, held in world.items():
        _require(sorted(held) == _indices(dst, at), dst, "at", at, "is no box")
        for index in held:
            due = {
                (place, peer) for peer in _members(src, counted, at)
                for place in _read(src, folds, peer) if _home(src, folds, place) == index
            }
            _require(dict(held[index]) == dict.fromkeys(due, 1), plan.src, "->", plan.dst, ":",
                     index, "at", at, "is", held[index])


def _judge(plan: Plan, world: World) -> None:
    """The partial values of the target, reduced, equal those of the source, reduced."""
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
        judged.update(members)  # partial values of one value have the same boxes
        for index in held:
            found = _reduce(dst, made, [world[member][index] for member in members])
            _require(found == expected[index], plan.src, "->", plan.dst, ":", index, "at", at,
                     "is", found)
