"""The operands that give the lengths of results; and whether an op's numbers are the call's own."""

from __future__ import annotations

from typing import Any

from weft.tensor.call.decide import Builder
from weft.tensor.trace.capture import Op
from weft.tensor.trace.trees import leaves

__all__ = ["Sources", "numbers_come_from", "sources_of"]

Sources = tuple[tuple[int, int] | None, ...]
"""Per dim, the slot and the dim that have its length; None: its length is 1."""


def sources_of(builder: Builder) -> list[Sources] | None:
    """Per result and dim, the slot and the dim of an operand that has its length (None: it is 1).

    None where lengths follow from arguments or from arithmetic.
    """
    op, rule = builder.op, builder.rule
    if builder.own is not None and not builder.own.by_shape:
        return None  # the user's function may look at lengths
    if type(op.results) is list and not builder.views_each:
        return None  # how many there are may follow from a length (unbind)
    if rule is None:
        return _of_layouts(builder)
    if rule.windows or rule.spreads or rule.by_size:  # other lengths may have another rule
        return None
    places: dict[str, tuple[int, int]] = {}
    for slot, dims in zip(builder.slots, rule.operands):
        shape = builder.tensors[slot].shape
        if dims is None or any(len(factors) > 1 for factors in dims):
            return None
        for dim, factors in enumerate(dims):
            if factors and shape[dim] == rule.sizes[factors[0]]:
                places.setdefault(factors[0], (slot, dim))
    if any(
        len(factors) > 1 or (factors and factors[0] not in places)
        for dims in rule.results for factors in dims
    ):
        return None  # a length that an argument says (repeat, one-hot)
    return [
        tuple([places[factors[0]] if factors else None for factors in dims])
        for dims in rule.results
    ]


def _of_layouts(builder: Builder) -> list[Sources] | None:
    """The sources of results that have the layout of an operand (zeros_like)."""
    if builder.decision is None:
        return None
    known = {id(layout): slot for slot, layout in zip(builder.slots, builder.layouts)}
    slots = [known.get(id(layout)) for layout in builder.decision.results]
    if None in slots:
        return None
    return [
        tuple([(slot, dim) for dim in range(len(builder.tensors[slot].shape))])  # type: ignore[index]
        for slot in slots
    ]


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
