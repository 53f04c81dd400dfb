"""Calls on tensors some of whose dims consist of stretches (`core.stretched`).

A rule says which dims of operands and results are one factor. An op whose operands share such a
factor treats each row by itself, wherever it stands: its result has the factor in the same
stretches. For any other op the rows change ranks first, to a layout of boxes, by a view whose data
move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft import ops, propagate
from weft.core import Layout, StretchedLayout, in_stretches
from weft.errors import UnsupportedOpError
from weft.rules import Call, Decision, Entry, Rule
from weft.tensor.call.recipe import Function
from weft.tensor.placing.boxed import boxed
from weft.tensor.trace.calls import Facts
from weft.tensor.trace.trees import map_tensors

__all__ = ["BY_BOXES", "Torn", "by_rule"]


class Torn(Exception):
    """An op needs to know where rows stand."""


def _by_boxes(func: Any, args: Any, kwargs: Any) -> Any:
    given: dict[int, Any] = {}

    def opened(tensor: torch.Tensor) -> torch.Tensor:
        made = boxed(tensor)
        if made is not tensor:
            given[id(made)] = made, tensor, (made.shape, made.stride())
        return made

    out = func(*map_tensors(opened, args), **map_tensors(opened, kwargs))
    for made, tensor, form in given.values():
        if (made.shape, made.stride()) != form:
            vars(tensor).pop("_boxed", None)
            raise UnsupportedOpError(
                getattr(func, "__name__", str(func)), f"the tensor is {tensor._meta.layout}",
                "in place, a shape changes where the elements stay", [str(tensor._meta.layout)],
                "the op without the trailing underscore")
    return map_tensors(
        lambda tensor: given[id(tensor)][1] if id(tensor) in given else tensor, out)


BY_BOXES = Function(_by_boxes)
"""The recipe of a call that needs its operands as boxes."""


def by_rule(
    call: Call, entry: Entry, about: Facts, layouts: Sequence[Layout],
    wants: Sequence[bool], target: int | None,
) -> Decision | ops.Kernel:
    """The decision for a call that treats rows alike.

    Raises:
        Torn: it may not.
    """
    if about.is_random:
        raise Torn
    plain = [one.plain for one in layouts]
    rule = next(iter(entry.covering(call, wants)), None)
    if rule is None:
        raise Torn
    counts = _counts(rule, layouts)
    decision = propagate.decide(rule, call, plain, wants, target, ())
    if any(decision.reads) or any(decision.folds) or decision.runs is not None or (
        decision.args is not None and (rule.counts or (rule.args is None and rule.size_arg is None))
    ):
        raise Torn
    results = [
        _marked(layout, named, counts) for layout, named in zip(decision.results, rule.results)]
    operands = [_marked(layout, named or (), counts)
                for layout, named in zip(decision.operands, rule.operands)]
    if any(one.is_stretched and (not due.is_stretched or due.dims != one.dims)
           for one, due in zip(layouts, operands)):
        raise Torn  # it would be gathered
    marked = replace(decision, operands=tuple(operands), results=tuple(results), by_form=False)
    if not decision.finish:
        return marked
    if not entry.adds_up or entry.kernel is None or any(
        operand == 0 and layouts[0].dims[dim] and not (
            isinstance(layouts[0], StretchedLayout) and layouts[0].stretches[dim] > 1)
        for operand, dim in decision.finish
    ):
        raise Torn
    axes = ops.Kernel.of(decision, entry.kernel).axes
    return ops.Kernel(marked, entry.kernel, axes)


def _counts(rule: Rule, layouts: Sequence[Layout]) -> dict[str, int]:
    """Per factor in stretches how many there are."""
    counts: dict[str, int] = {}
    for named, layout in zip(rule.operands, layouts):
        if not isinstance(layout, StretchedLayout):
            continue
        for dim, count in enumerate(layout.stretches):
            if count == 1:
                continue
            if not named or len(named[dim]) != 1:
                raise Torn
            counts[named[dim][0]] = count
    for named, layout in zip(rule.operands, layouts):
        for dim, factors in enumerate(named or ()):
            if not counts.keys().isdisjoint(factors) and not (
                len(factors) == 1 and _agrees(layout, dim, counts[factors[0]])
            ):
                raise Torn
    if any(name in counts and (
        len(factors) > 1 or name in rule.whole or (at, name) in rule.spreads
    ) for at, named in enumerate(rule.results) for factors in named for name in factors) or any(
        name in counts for name in (
            *rule.offsets, *[name for _, name in rule.windows],
            *[name for _, *both in rule.beside for name in both])
    ):
        raise Torn
    return counts


def _agrees(layout: Layout, dim: int, count: int) -> bool:
    """Whether the rows of an operand stand as those of one in so many stretches."""
    if isinstance(layout, StretchedLayout) and layout.stretches[dim] > 1:
        return layout.stretches[dim] == count
    return not layout.dims[dim]


def _marked(
    layout: Layout, named: Sequence[Sequence[str]], counts: Mapping[str, int]
) -> Layout:
    """The layout with the stretches of its factors, where these are sharded."""
    stretches = [
        counts.get(factors[0], 1) if factors and axes else 1
        for factors, axes in zip(named, layout.dims)]
    for dim, count in enumerate(stretches):
        if count > 1 and any(cut % count for cut in layout.cuts_of(dim)):
            raise Torn
    return in_stretches(layout, stretches)
