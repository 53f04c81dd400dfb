"""From one axis to many: every mesh axis takes its candidate, and together they give layouts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from weft.core import Layout
from weft.core.dtypes import itemsize
from weft.propagate.choose import (
    NEEDS_COST,
    UNKNOWN_FACTOR,
    Choice,
    Frame,
    PassPartial,
    Slices,
    bias_operands,
    cheapest,
    cut_beside,
    zero_cost_choice,
)
from weft.propagate.factor_cuts import Cuts, cuts_of_factor, default_of, scaled, spread_sole_shard
from weft.propagate.local import Cut, in_full, local_call, window_of, windowed_cuts
from weft.rules import Call, Decision, Rule, TensorArg

__all__ = ["can_be_sharded", "decide"]

_GRADIENT_KINDS = ("sum", "avg", "product")


def decide(
    rule: Rule, call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool],
    target: int | None = None, slices: Slices = (),
) -> Decision:
    """The layouts that the operands of a call are moved to, and those of its results.

    Args:
        rule: what the op means, from its entry in the book.
        call: the op with its arguments and results.
        layouts: of the tensor operands, in the order of `call.tensors`, all on one mesh.
        wants_grad: per operand, whether its gradient will be requested.
        target: the operand that the call writes to, which keeps its layout.
        slices: per operand, what it is a slice of, if it is one.
    """
    frame = _frame(rule, call, layouts, wants_grad, target)
    if any(slices):
        frame.slices = [None if at == target else one for at, one in enumerate(slices)]
    num_axes = len(frame.sizes)
    choices = [zero_cost_choice(frame, axis) for axis in range(num_axes)]
    compared = [axis for axis, choice in enumerate(choices) if choice is NEEDS_COST]
    for axis in compared:
        choices[axis] = cheapest(frame, axis, _shards(frame, choices, axis))
    _drop_mixed_kinds(frame, choices)
    cut: dict[str, Cut] = {}
    for axis, choice in enumerate(choices):
        if isinstance(choice, str) and choice not in cut:
            axes = [other for other in range(axis, num_axes) if choices[other] == choice]
            order, cuts = cuts_of_factor(frame, layouts, choice, axes)
            if cuts is not None and (rule.unread or any(axis in compared for axis in axes)):
                cuts = spread_sole_shard(frame, layouts, choice, order, cuts)
            for other in axes:
                if other not in order:
                    choices[other] = None
            if order:
                cut[choice] = order, cuts
    beside = _beside(frame, layouts, choices, cut) if frame.beside else []
    operands = _operands(frame, layouts, choices, cut, beside)
    results = _results(frame, call, layouts[0], choices, cut)
    finish = _finished_dims(frame, cut) if frame.finished else ()
    local = local_call(rule, call, operands, results, cut)
    by_form = not (
        compared or beside or rule.by_size or rule.windows or rule.spreads or "runs" in local
    ) and cut.keys().isdisjoint(rule.offsets) and (
        # Whether shards are empty is a matter of lengths.
        not rule.nonempty or rule.nonempty.isdisjoint(
            [factor for row in frame.held for factor in row]))
    return Decision(
        operands, results, op=rule.op, chosen=tuple([
            "" if choice is None else choice if isinstance(choice, str)
            else f"partial({choice.kind})" for choice in choices
        ]),
        by_form=by_form, finish=finish, keeps=rule.keeps, **local,
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
    cut: dict[str, Cut],
) -> list[str]:
    """The factors that are cut beside others; `cut` learns their cuts."""
    found: list[str] = []
    for axis, choice in enumerate(choices):
        found += cut_beside(frame, frame.held[axis], choice)
    for factor in dict.fromkeys(found):
        axes = [axis for axis, choice in enumerate(choices) if choice == factor
                or factor in cut_beside(frame, frame.held[axis], choice)]
        cut[factor] = cuts_of_factor(frame, layouts, factor, axes)
    return found


def _finished_dims(frame: Frame, cut: dict[str, Cut]) -> tuple[tuple[int, int], ...]:
    """The sharded dims whose shards a kernel combines, of one operand each."""
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
                    leads.setdefault(lead, []).append((index, dim, inner))
                if index in rule.unread and lead in rule.whole:
                    continue  # it stays sharded in this dim, and the result has others
                for axis in axes:
                    held[axis][index] = lead
                    own /= sizes[axis]
            for axis, kind in enumerate(layout.partial):
                if kind is not None and index not in rule.unread:
                    row: list[str | None] = kinds[axis] or [None] * num
                    row[index] = kind
                    kinds[axis] = row
        nbytes.append(own)
    if rule.bias:
        leads = _products_first(leads, rule.bias)
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


def _products_first(
    leads: dict[str, list[tuple[int, int, int]]], bias: Collection[int]
) -> dict[str, list[tuple[int, int, int]]]:
    """The factors in the order of the operands, but for those that are only added to the result:
    of candidates that cost the same the first is taken, which the product of the others decides."""
    return dict(sorted(leads.items(), key=lambda item: min(
        [operand for operand, _, _ in item[1] if operand not in bias], default=math.inf)))


def _nbytes(tensor: TensorArg) -> int:
    return math.prod(tensor.shape) * itemsize(tensor.dtype)


def _bar(
    rule: Rule, leads: dict[str, Any], barred: set[str], finished: dict[str, list[int]],
    wants_grad: Sequence[bool],
) -> None:
    """Bar factors that no axis may shard: a factor must lead a dim of every result, or be reduced
    by a kind that has a gradient where one is wanted."""
    for dims in rule.results:
        kept = {factors[0] for factors in dims if factors}
        barred.update(*[factors[1:] for factors in dims])
        barred.update([name for name in leads if name not in kept and name not in rule.reduce
                       and name not in finished])
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


def _operands(
    frame: Frame, layouts: Sequence[Layout], choices: Sequence[Choice],
    cut: dict[str, Cut], beside: Sequence[str] = (),
) -> tuple[Layout, ...]:
    rule = frame.rule
    entering: list[dict[int, str]] = [{} for _ in layouts]
    for axis, choice in enumerate(choices):
        if choice is None:
            continue
        if isinstance(choice, PassPartial):
            for member in choice.members:
                entering[member][axis] = choice.kind
        elif choice in rule.reduce:
            for member in bias_operands(frame, choice):
                entering[member][axis] = "sum"
    out: list[Layout] = []
    for index, (dims, layout) in enumerate(zip(rule.operands, layouts)):
        if dims is None or index in rule.unread:
            out.append(layout)
            continue
        partial = layout.partial
        if entering[index] or any(partial):
            partial = tuple([entering[index].get(axis) for axis in range(len(partial))])
        mine = cut if not beside else {
            name: how for name, how in cut.items()
            if name not in beside or index in frame.beside[name][1]
        }
        out.append(_come_to(rule, index, dims, layout, partial, mine))
    return tuple(out)


def _come_to(
    rule: Rule, index: int, dims: Any, layout: Layout, partial: tuple[str | None, ...],
    cut: dict[str, Cut],
) -> Layout:
    """The operand's layout with these cuts; the very same object if it already has them."""
    same = partial == layout.partial
    axes_of: list[tuple[int, ...]] = []
    cuts_of: list[Cuts] = []
    for dim, factors in enumerate(dims):
        axes: tuple[int, ...] = ()
        cuts: Cuts = None
        if factors and factors[0] in cut:
            axes, units = mine = cut[factors[0]]
            offsets = rule.offsets.get(factors[0])
            if offsets is not None:
                start, size = offsets[index], layout.shape[dim]
                assert units is not None
                cuts = tuple([min(max(unit - start, 0), size) for unit in units])
            elif (window := window_of(rule, index, factors[0])) is not None:
                cuts = windowed_cuts(rule, layout, dim, factors[0], window, mine)
            else:
                cuts = scaled(rule, layout, factors, mine)
        if same and (axes != layout.dims[dim] or (
            axes and cuts != layout.cuts[dim] and (cuts or default_of(layout, dim))
            != layout.cuts_of(dim)
        )):
            same = False
        axes_of.append(axes)
        cuts_of.append(cuts)
    if same:
        return layout
    return Layout.make(layout.mesh, layout.shape, axes_of, cuts_of, partial)


def _results(
    frame: Frame, call: Call, like: Layout, choices: Sequence[Choice],
    cut: dict[str, Cut],
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
        for factors, length in zip(dims, result.shape):
            mine: Cut = cut.get(factors[0], ((), None)) if factors else ((), None)
            axes_of.append(mine[0])
            if not mine[0]:
                cuts_of.append(None)
            elif (spread := rule.spreads.get((index, factors[0]))) is not None:
                cuts_of.append(spread.cuts(in_full(rule, like, factors[0], mine), length))
            else:
                cuts_of.append(scaled(rule, like, factors, mine))
        made.append(Layout.make(like.mesh, result.shape, axes_of, cuts_of, partial))
    return tuple(made)
