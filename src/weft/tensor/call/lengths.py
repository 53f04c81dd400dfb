"""The operands that give the lengths of results; and whether an op's numbers are the call's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.rules import Length, Rule
from weft.tensor.call.decide import Builder
from weft.tensor.trace.capture import Op
from weft.tensor.trace.trees import leaves, slots_of

__all__ = ["Place", "Source", "Sources", "numbers_come_from", "places_in", "sources_of", "summed"]

Place = tuple[int, int]
"""A slot, and a dim of its tensor."""

Source = Place | Length
"""Where a length stands; else what it is the sum of, in places."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where lengths of an op's results come from.

    Args:
        results: per result and dim.
        fixed: the operands' dims that have to be as long as they are.
        least: how long some of them have to be.
        sizes_flow: whether the call's numbers are nothing but lengths of the result.
        parts: whether a result lies in memory as the one operand does, of which each of its dims
            is a part.
    """

    results: list[tuple[Source, ...]]
    fixed: frozenset[Place] = frozenset()
    least: tuple[tuple[int, int, int], ...] = ()
    sizes_flow: bool = False
    parts: bool = False


def sources_of(builder: Builder) -> Sources | None:
    """None where lengths follow from arguments, or from arithmetic that is no sum."""
    op, rule = builder.op, builder.rule
    if builder.own is not None and not builder.own.by_shape:
        return None  # the user's function may look at lengths
    if type(op.results) is list:
        return None  # how many there are may follow from a length (unbind)
    if rule is None or (builder.decision is not None and builder.decision.lengths is not None):
        return _of_decision(builder)
    if rule.windows or rule.spreads or rule.by_size:  # other lengths may have another rule
        return None
    return _of_rule(builder, rule)


def _of_rule(builder: Builder, rule: Rule) -> Sources | None:
    places: dict[tuple[str, ...], Place] = {}
    held: list[tuple[Place, tuple[str, ...]]] = []
    for slot, dims in zip(builder.slots, rule.operands):
        if dims is None:
            return None
        shape = builder.tensors[slot].shape
        for dim, factors in enumerate(dims):
            if factors:
                held.append(((slot, dim), factors))
                if shape[dim] == math.prod([rule.sizes[name] for name in factors]):
                    places.setdefault(factors, (slot, dim))
    sums: dict[tuple[str, ...], Source] = {
        (name,): Length(tuple([place for place, factors in held if factors == (name,)]))
        for name in rule.offsets
    }
    told = rule.size_arg is not None
    found: list[tuple[Source, ...]] = []
    joined: set[Place] = set()
    for slot, dims in zip(slots_of(builder.op.results), rule.results):
        sources: list[Source] = []
        for dim, factors in enumerate(dims):
            length = builder.trace.metas[slot.index].shape[dim]
            source = sums.get(factors) or places.get(factors)
            if source is None and len(factors) > 1:
                source = _product(builder, held, factors[0], length)
                joined.update(() if source is None else source.times)
            if source is None:
                if factors and not told:
                    return None  # a length that an argument says (repeat, one-hot)
                source = Length((), length)
            sources.append(source)
        found.append(tuple(sources))
    made = [factors for dims in rule.results for factors in dims]
    joint = {name for factors in (*made, *[one for _, one in held]) if len(factors) > 1
             for name in factors}
    fixed = frozenset([
        place for place, factors in held if place not in joined
        and (not joint.isdisjoint(factors) or (told and factors not in made))
    ])
    of = dict(zip(builder.slots, builder.layouts))
    if any(of[slot].cuts[dim] is not None for slot, dim in fixed):
        return None
    return Sources(found, fixed, sizes_flow=told, parts=not told and rule.moves and not sums)


def _product(
    builder: Builder, held: Sequence[tuple[Place, tuple[str, ...]]], lead: str, length: int
) -> Length | None:
    """Of dims that are joined: the first, which leads, times those after it, all but dims of one
    element."""
    first = next((place for place, factors in held if factors == (lead,)), None)
    if first is None:
        return None
    slot, dim = first
    shape = builder.tensors[slot].shape
    total, times = shape[dim], list[Place]()
    for other in range(dim + 1, len(shape)):
        if total == length:
            break
        if shape[other] != 1:
            times.append((slot, other))
            total *= shape[other]
    names = [factors for place, factors in held if place in times]
    if total != length or not times or any(len(factors) != 1 for factors in names):
        return None
    return Length((first,), times=tuple(times))


def _of_decision(builder: Builder) -> Sources | None:
    """Those of results of which a decision says how long they are, or that have the very layout of
    an operand (zeros_like)."""
    decision, first = builder.decision, builder.slots[0]
    if decision is None:
        return None
    if decision.lengths is not None:
        found = [
            _at(length, first) if length.plus or length.terms[1:] or not length.terms
            else (first, length.terms[0][1])
            for length in decision.lengths
        ]
        least = [(first, *rest) for length in decision.lengths for _, *rest in length.least]
        return Sources([tuple(found)], least=tuple(least), parts=True)  # type: ignore[arg-type]
    known = {id(layout): slot for slot, layout in zip(builder.slots, builder.layouts)}
    slots = [known.get(id(layout)) for layout in decision.results]
    if None in slots:
        return None
    return Sources([
        tuple([(slot, dim) for dim in range(len(builder.tensors[slot].shape))])  # type: ignore[index]
        for slot in slots
    ])


def _at(length: Length, slot: int) -> Length:
    return Length(tuple([(slot, dim) for _, dim in length.terms]), length.plus)


def summed(source: Source, sources: Sequence[Sequence[Source]], num: int) -> Source | None:
    """The source in places of the first `num` tensors, where `sources` has those of the others.
    None where it is neither a sum nor a product of theirs."""
    if type(source) is tuple:
        return source if source[0] < num else sources[source[0] - num][source[1]]
    assert isinstance(source, Length)
    terms: list[Place] = []
    plus = source.plus
    for term in source.terms:
        one = summed(term, sources, num)
        if isinstance(one, Length):
            if one.times:
                return None
            terms += one.terms
            plus += one.plus
        elif one is not None:
            terms.append(one)
    times = [summed(place, sources, num) for place in source.times]
    if not all(type(one) is tuple for one in times):
        return None
    return Length(tuple(terms), plus, tuple(times))  # type: ignore[arg-type]


def places_in(source: Source) -> tuple[Place, ...]:
    """The places that its length comes from."""
    return source.terms + source.times if isinstance(source, Length) else (source,)


def numbers_come_from(op: Op, tree: Any) -> bool:
    """Whether every integer of the op is one of the call's own, or the schema's default.

    A Python function may compute numbers from lengths; what it recorded then serves one size.
    """
    given = _integers(tree)
    schema = op.overload._schema.arguments
    for argument, value in zip(schema, (*op.args, *op.kwargs.values())):
        if not _integers(value) <= given and value != argument.default_value:
            return False
    return True


def _integers(tree: Any) -> set[int]:
    return {number for number in leaves(tree, int) if type(number) is int}
