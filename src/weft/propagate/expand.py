"""From one axis to many: every mesh axis takes its candidate, then they join into layouts.

Axes that shard one factor must agree on one order and one vector of cuts. These come from the
operand with the most bytes that already has them, or from another operand if that requires less of
the busiest rank: of three operands on one rank, on both, and on the other, the cuts of the second.
Where a factor leads a compound dim, its cuts are multiples of the product of the dim's other
factors. Cuts that are not move to the nearest multiples: an exchange of a few rows, not a gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from weft.core import Layout, default_cuts, filled_cuts
from weft.propagate.choose import (
    NEEDS_COST,
    UNKNOWN_FACTOR,
    Choice,
    Frame,
    PassPartial,
    bias_operands,
    cheapest,
    cut_beside,
    zero_cost_choice,
)
from weft.propagate.cuts import busiest, fairest, nearest
from weft.propagate.local import local_call, window_of, windowed_cuts
from weft.rules import Call, Decision, Rule, Table, TensorArg, Window

__all__ = ["can_be_sharded", "decide"]

Cuts = tuple[int, ...] | None
"""Cuts in units of a factor; None means the default."""

_GRADIENT_KINDS = ("sum", "avg", "product")

_ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}


def decide(
    rule: Rule, call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool],
    target: int | None = None,
) -> Decision:
    """The layouts that the operands of a call are moved to, and those of its results.

    Args:
        rule: what the op means, from its entry in the book.
        call: the op with its arguments and results.
        layouts: of the tensor operands, in the order of `call.tensors`, all on one mesh.
        wants_grad: per operand, whether its gradient will be requested.
        target: the operand that the call writes to, which keeps its layout.
    """
    frame = _frame(rule, call, layouts, wants_grad, target)
    num_axes = len(frame.sizes)
    choices = [zero_cost_choice(frame, axis) for axis in range(num_axes)]
    by_form = not (rule.nonempty or rule.by_size)
    for axis, choice in enumerate(choices):
        if choice is NEEDS_COST:
            choices[axis] = cheapest(frame, axis, _shards(frame, choices, axis))
            by_form = False
    _drop_mixed_kinds(frame, choices)
    cut: dict[str, tuple[tuple[int, ...], Cuts]] = {}
    for axis, choice in enumerate(choices):
        if isinstance(choice, str) and choice not in cut:
            axes = [other for other in range(axis, num_axes) if choices[other] == choice]
            order, cuts = _cuts(frame, layouts, choice, axes)
            for other in axes:
                if other not in order:
                    choices[other] = None
            if order:
                cut[choice] = order, cuts
    beside = _beside(frame, layouts, choices, cut) if frame.beside else []
    operands = _operands(frame, layouts, choices, cut, beside)
    results = _results(frame, call, layouts[0], choices, cut)
    finish = _finished_dims(frame, cut) if frame.finished else ()
    # A kernel may read the cuts of all the operands that it finishes.
    by_form = by_form and not beside and len({operand for operand, _ in finish}) < 2
    local = local_call(rule, call, operands, results, cut)
    by_form = by_form and not (rule.windows or rule.spreads)
    return Decision(
        operands, results, op=rule.op, chosen=tuple([
            "" if choice is None else choice if isinstance(choice, str)
            else f"partial({choice.kind})" for choice in choices
        ]),
        by_form=by_form, finish=finish, **local,
    )


def can_be_sharded(rule: Rule, operand: int) -> tuple[int, ...]:
    """The dims of an operand that a rule lets be sharded, with results sharded alike."""
    kept = [{factors[0] for factors in dims if factors} for dims in rule.results]
    return tuple([
        dim for dim, factors in enumerate(rule.operands[operand] or ())
        if factors and factors[0] not in rule.whole and all(factors[0] in each for each in kept)
    ])


def _shards(frame: Frame, choices: Sequence[Choice], axis: int) -> dict[str, int]:
    """Into how many shards the other axes divide each factor, as decided or as held."""
    found: dict[str, int] = {}
    for other, choice in enumerate(choices):
        names = [choice] if isinstance(choice, str) else (
            dict.fromkeys(frame.held[other]) if choice is NEEDS_COST else ())
        for name in names:
            if name is not None and other != axis:
                found[name] = found.get(name, 1) * max(frame.sizes[other], 2)
    return found


def _beside(
    frame: Frame, layouts: Sequence[Layout], choices: Sequence[Choice],
    cut: dict[str, tuple[tuple[int, ...], Cuts]],
) -> list[str]:
    """The factors that are cut beside others; `cut` learns their cuts."""
    found: list[str] = []
    for axis, choice in enumerate(choices):
        found += cut_beside(frame, frame.held[axis], choice)
    for factor in dict.fromkeys(found):
        axes = [axis for axis, choice in enumerate(choices) if choice == factor
                or factor in cut_beside(frame, frame.held[axis], choice)]
        cut[factor] = _cuts(frame, layouts, factor, axes)
    return found


def _finished_dims(
    frame: Frame, cut: dict[str, tuple[tuple[int, ...], Cuts]]
) -> tuple[tuple[int, int], ...]:
    """The sharded dims that a kernel finishes, of one operand each."""
    return tuple([
        next((operand, dim) for operand, dim, _ in frame.leads[factor] if operand in brings)
        for factor, brings in frame.finished.items() if factor in cut
    ])


def _frame(
    rule: Rule, call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool],
    target: int | None = None,
) -> Frame:
    sizes = layouts[0].mesh.axis_sizes
    num = len(layouts)
    held: list[list[str | None]] = [[None] * num for _ in sizes]
    kinds: list[list[str | None] | None] = [None] * len(sizes)
    leads: dict[str, list[tuple[int, int, int]]] = {}
    barred = set(rule.whole)
    nbytes: list[float] = []
    for index, (dims, layout) in enumerate(zip(rule.operands, layouts)):
        own = float(_nbytes(call.tensors[index]))
        if dims is not None:
            for dim, (factors, axes) in enumerate(zip(dims, layout.dims)):
                lead = UNKNOWN_FACTOR
                if factors:
                    lead, inner = factors[0], 1
                    if len(factors) > 1:
                        barred.update(factors[1:])
                        inner = math.prod([rule.sizes[name] for name in factors[1:]])
                    if lead in leads:
                        leads[lead].append((index, dim, inner))
                    else:
                        leads[lead] = [(index, dim, inner)]
                for axis in axes:
                    held[axis][index] = lead
                    own /= sizes[axis]
            for axis, kind in enumerate(layout.partial):
                if kind is not None:
                    row: list[str | None] = kinds[axis] or [None] * num
                    row[index] = kind
                    kinds[axis] = row
        nbytes.append(own)
    finished: dict[str, list[int]] = {}
    for operand, factor in sorted(rule.finish) if rule.finish else ():
        if factor in leads and rule.sizes[factor]:
            finished.setdefault(factor, []).append(operand)
        else:
            barred.add(factor)  # nothing to finish
    _bar(rule, leads, barred, finished, wants_grad)
    like = call.tensors[0].dtype if call.tensors else ""  # of results whose dtype is not known
    results = sum([
        _nbytes(TensorArg(result.shape, result.dtype or like)) for result in call.results
    ])
    frame = Frame(
        rule, results, leads, barred, finished, held, kinds, nbytes, wants_grad, sizes, target
    )
    for operand, factor, other in sorted(rule.beside) if rule.beside else ():
        if factor in finished and other not in barred:
            frame.beside.setdefault(factor, (other, []))[1].append(operand)
    return frame


def _nbytes(tensor: TensorArg) -> int:
    return math.prod(tensor.shape) * _ITEMSIZE.get(tensor.dtype, 4)


def _bar(
    rule: Rule, leads: dict[str, Any], barred: set[str], finished: dict[str, list[int]],
    wants_grad: Sequence[bool],
) -> None:
    """Bar factors that no axis may shard: a factor must lead a dim of every result, or be reduced
    by a kind that has a gradient where one is wanted."""
    for dims in rule.results:
        kept = {factors[0] for factors in dims if factors}
        for factors in dims:
            if len(factors) > 1:
                barred.update(factors[1:])
        for name in leads:
            if name not in kept and name not in rule.reduce and name not in finished:
                barred.add(name)
    if rule.reduce and True in wants_grad:
        barred.update(
            name for name, kind in rule.reduce.items() if kind not in _GRADIENT_KINDS
        )


def _drop_mixed_kinds(frame: Frame, choices: list[Choice]) -> None:
    """A layout has one kind of partial values (sum and avg may occur together); the axes that
    would bring another kind replicate."""
    first: str | None = None
    for axis, choice in enumerate(choices):
        if choice is None:
            continue
        kind = frame.rule.reduce.get(choice) if isinstance(choice, str) else choice.kind
        kind = "sum" if kind == "avg" else kind
        if kind is not None:
            first = first or kind
            if kind != first:
                choices[axis] = None


# The cuts of one factor.


def _cuts(
    frame: Frame, layouts: Sequence[Layout], factor: str, axes: Sequence[int]
) -> tuple[tuple[int, ...], Cuts]:
    """(order of axes, cuts) for the axes that shard a factor. The last axis is dropped if the
    op refuses empty shards and the factor has too few elements."""
    places = frame.leads[factor]
    if factor in frame.finished:  # as in the operand that brings it sharded
        brings = frame.finished[factor]
        places = [place for place in places if place[0] in brings]
    operand, dim, inner = places[0]
    if len(places) > 1:
        most = (-1, -1.0)
        for place in places:
            layout = layouts[place[0]]
            have = layout.dims[place[1]]
            score = (sum(axis in have for axis in axes), frame.nbytes[place[0]])
            if score > most:
                most, (operand, dim, inner) = score, place
    layout = layouts[operand]
    have = layout.dims[dim]
    order = tuple([axis for axis in have if axis in axes])
    if len(order) < len(axes):
        order += tuple([axis for axis in axes if axis not in order])
    offsets = frame.rule.offsets.get(factor)
    length = frame.rule.sizes[factor]
    sizes = [frame.sizes[axis] for axis in order]
    if factor in frame.rule.nonempty:
        while sizes and length < math.prod(sizes):
            order, sizes = order[:-1], sizes[:-1]
    if offsets is not None:
        return order, _joined_cuts(frame, layouts, factor, offsets, order)
    if not order:
        return order, None
    cuts = _units(layout, dim, inner, order, length, sizes, window_of(frame.rule, operand, factor))
    if len(places) > 1:
        cuts = _least_moved(frame, layouts, factor, places, order, length, cuts)
    if factor in frame.rule.nonempty:
        full = cuts or default_cuts(length, sizes)
        if any(start == stop for start, stop in pairwise(full)):
            cuts = filled_cuts(full)
    return order, cuts


def _units(
    layout: Layout, dim: int, inner: int, order: tuple[int, ...], length: int,
    sizes: Sequence[int], window: Window | Table | None,
) -> Cuts:
    """The cuts of a dim in units of its leading factor, for axes that may differ from its own."""
    have = layout.dims[dim]
    if window is not None:
        if have != order:
            return None
        return window.units(layout.cuts_of(dim), length)
    if have == order:
        if inner == 1:
            return layout.cuts[dim]
        full = layout.cuts_of(dim)
    else:
        # Axes that both begin with keep their cuts; later ones chunk each piece.
        same = 0
        while same < min(len(have), len(order)) and have[same] == order[same]:
            same += 1
        if same == 0:
            return None
        step = math.prod(layout.mesh.axis_sizes[axis] for axis in have[same:])
        full = layout.cuts_of(dim)[::step]
        rest = sizes[same:]
        fine = [0]
        units = [nearest(cut, inner) for cut in full]
        for start, stop in pairwise(units):
            fine += [start + cut for cut in default_cuts(stop - start, rest)[1:]]
        return tuple(fine)
    return tuple([nearest(cut, inner) for cut in full])


def _least_moved(
    frame: Frame, layouts: Sequence[Layout], factor: str,
    places: Sequence[tuple[int, int, int]], order: tuple[int, ...], length: int, cuts: Cuts,
) -> Cuts:
    """The given cuts of a factor, or other cuts that operands have, or the default, if these
    require less of the busiest rank; or the same, and leave it with less."""
    sizes = [frame.sizes[axis] for axis in order]
    default = default_cuts(length, sizes)
    held: list[tuple[tuple[int, ...], float]] = []
    for operand, dim, inner in places:
        layout = layouts[operand]
        if layout.dims[dim] == order:
            window = window_of(frame.rule, operand, factor)
            own = _units(layout, dim, inner, order, length, sizes, window) or default
            row = frame.nbytes[operand] * (len(own) - 1) / max(length, 1)
            held.append((own, row * (2 if frame.grads[operand] else 1)))
    options = list(dict.fromkeys([cuts or default, *[own for own, _ in held], default]))
    if len(options) == 1 or len(held) < 2:
        return cuts
    best = min(options, key=lambda option: (
        busiest(option, held), max([stop - start for start, stop in pairwise(option)])
    ))
    return None if best == default else best


def _joined_cuts(
    frame: Frame, layouts: Sequence[Layout], factor: str, offsets: Sequence[int],
    order: tuple[int, ...],
) -> tuple[int, ...]:
    """Cuts of a concatenation: the default, or those of one operand with the first and the last
    shard taking what lies before and after it."""
    length = frame.rule.sizes[factor]
    held: list[tuple[tuple[int, ...], float]] = []
    options = [default_cuts(length, [frame.sizes[axis] for axis in order])]
    for operand, dim, _ in frame.leads[factor]:
        layout, offset = layouts[operand], offsets[operand]
        own = tuple([offset + cut for cut in layout.cuts_of(dim)])
        if layout.dims[dim] == order:
            options.append((0, *own[1:-1], length))
            row = frame.nbytes[operand] * (len(own) - 1) / max(layout.shape[dim], 1)
            held.append((own, row))
    return fairest(options, held)


# The layouts.


def _operands(
    frame: Frame, layouts: Sequence[Layout], choices: Sequence[Choice],
    cut: dict[str, tuple[tuple[int, ...], Cuts]], beside: Sequence[str] = (),
) -> tuple[Layout, ...]:
    rule = frame.rule
    entering: dict[int, list[tuple[int, str]]] = {}
    for axis, choice in enumerate(choices):
        if choice is None:
            continue
        if isinstance(choice, PassPartial):
            for member in choice.members:
                entering.setdefault(member, []).append((axis, choice.kind))
        elif choice in rule.reduce:
            for member in bias_operands(frame, choice):
                entering.setdefault(member, []).append((axis, "sum"))
    out: list[Layout] = []
    for index, (dims, layout) in enumerate(zip(rule.operands, layouts)):
        if dims is None:
            out.append(layout)
            continue
        partial = layout.partial
        if index in entering or any(partial):
            fresh: list[str | None] = [None] * len(partial)
            for axis, kind in entering.get(index, ()):
                fresh[axis] = kind
            partial = tuple(fresh)
        mine = cut if not beside else {
            name: how for name, how in cut.items()
            if name not in beside or index in frame.beside[name][1]
        }
        out.append(_come_to(rule, index, dims, layout, partial, mine))
    return tuple(out)


def _come_to(
    rule: Rule, index: int, dims: Any, layout: Layout, partial: tuple[str | None, ...],
    cut: dict[str, tuple[tuple[int, ...], Cuts]],
) -> Layout:
    """The operand's layout with these cuts; the very same object if it already has them."""
    same = partial == layout.partial
    axes_of: list[tuple[int, ...]] = []
    cuts_of: list[Cuts] = []
    for dim, factors in enumerate(dims):
        axes: tuple[int, ...] = ()
        cuts: Cuts = None
        if factors and factors[0] in cut:
            axes, units = cut[factors[0]]
            offsets = rule.offsets.get(factors[0])
            if offsets is not None:
                start, size = offsets[index], layout.shape[dim]
                assert units is not None
                cuts = tuple([min(max(unit - start, 0), size) for unit in units])
            elif (window := window_of(rule, index, factors[0])) is not None:
                cuts = windowed_cuts(rule, layout, dim, factors[0], window, axes, units)
            else:
                cuts = _scaled(rule, layout, factors, axes, units)
        if same and (axes != layout.dims[dim] or (
            axes and cuts != layout.cuts[dim] and (cuts or _default(layout, dim))
            != layout.cuts_of(dim)
        )):
            same = False
        axes_of.append(axes)
        cuts_of.append(cuts)
    if same:
        return layout
    return Layout.make(layout.mesh, layout.shape, axes_of, cuts_of, partial)


def _default(layout: Layout, dim: int) -> tuple[int, ...]:
    return default_cuts(
        layout.shape[dim], [layout.mesh.axis_sizes[axis] for axis in layout.dims[dim]]
    )


def _scaled(
    rule: Rule, layout: Layout, factors: Sequence[str], axes: Sequence[int], units: Cuts
) -> Cuts:
    """A dim's cuts, from those of its leading factor."""
    if len(factors) == 1:
        return units
    if units is None:
        sizes = [layout.mesh.axis_sizes[axis] for axis in axes]
        units = default_cuts(rule.sizes[factors[0]], sizes)
    inner = math.prod([rule.sizes[name] for name in factors[1:]])
    return tuple([unit * inner for unit in units])


def _results(
    frame: Frame, call: Call, like: Layout, choices: Sequence[Choice],
    cut: dict[str, tuple[tuple[int, ...], Cuts]],
) -> tuple[Layout, ...]:
    rule = frame.rule
    partial = tuple([
        None if choice is None else rule.reduce.get(choice) if isinstance(choice, str)
        else choice.kind for choice in choices
    ])
    made: list[Layout] = []
    for index, (dims, result) in enumerate(zip(rule.results, call.results)):
        if index and dims == rule.results[0] and result.shape == call.results[0].shape:
            made.append(made[0])
            continue
        axes_of: list[tuple[int, ...]] = []
        cuts_of: list[Cuts] = []
        for factors in dims:
            axes, units = cut.get(factors[0], ((), None)) if factors else ((), None)
            axes_of.append(axes)
            cuts_of.append(_scaled(rule, like, factors, axes, units) if axes else None)
            if axes and (spread := rule.spreads.get((index, factors[0]))) is not None:
                sizes = [frame.sizes[axis] for axis in axes]
                units = units or default_cuts(rule.sizes[factors[0]], sizes)
                cuts_of[-1] = spread.cuts(units, result.shape[len(axes_of) - 1])
        made.append(Layout.make(like.mesh, result.shape, axes_of, cuts_of, partial))
    return tuple(made)
