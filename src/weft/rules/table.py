"""The one table of rules: an op's name to the function that gives its rule for a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.core import Layout
from weft.rules import (
    batched,
    contraction,
    count,
    index,
    placed,
    pointwise,
    reduction,
    view,
    windows,
)
from weft.rules.factors import packet
from weft.rules.notation import Call, Decision, Rule

__all__ = ["DECISIONS", "RULES", "covers", "lookup", "numbers_flow"]

_RULES: Mapping[str, Callable[[Call], Rule | None]] = {
    **pointwise.RULES, **reduction.RULES, **contraction.RULES, **view.RULES, **index.RULES,
    **count.RULES, **batched.RULES, **windows.RULES,
}
_DECISIONS: Mapping[str, Callable[[Call, Sequence[Layout]], Decision | Rule | None]] = {
    **pointwise.DECISIONS, **index.DECISIONS, **placed.DECISIONS,
}
_COPIES = """
    alias detach diagonal expand permute select slice split split_with_sizes squeeze t transpose
    unbind unfold unsqueeze view view_as_real view_as_complex
""".split()  # noqa: SIM905
"""Views with a variant that copies (`aten.permute_copy`), of which the same holds."""


def _with_copies(table: Mapping[str, Any]) -> dict[str, Any]:
    copies = {f"aten.{name}_copy": table.get(f"aten.{name}") for name in _COPIES}
    return {**table, **{name: rule for name, rule in copies.items() if rule is not None}}


RULES = _with_copies(_RULES)
"""Ops whose meaning for sharded operands a rule says."""

DECISIONS = _with_copies(_DECISIONS)
"""Ops for which the operands' cuts decide."""


def lookup(call: Call, layouts: Sequence[Layout]) -> Rule | Decision | None:
    """The rule of a call, or the decision itself where the operands' cuts leave no choice.

    None when no rule says this op, or not with these arguments (a random dropout, a mean loss):
    then an algorithm, a decomposition or the fallback serves.

    Args:
        call: one ATen op; in-place and out= variants are found under their functional op.
        layouts: of the tensor operands, in the order of `call.tensors`.
    """
    name = packet(call.op)
    rule = RULES.get(name)
    if rule is not None:
        return rule(call)
    decision = DECISIONS.get(name)
    return None if decision is None else decision(call, layouts)


def covers(op: str) -> bool:
    """Whether a rule says this op, at least with some arguments."""
    name = packet(op)
    return name in RULES or name in DECISIONS


def numbers_flow(op: str) -> bool:
    """Whether floats among the arguments only flow through: no rule reads their value.

    Then one decision serves every learning rate; the types of the arguments still count.
    """
    name = packet(op)
    if name in pointwise.RULES:
        return name not in pointwise.VALUES_MATTER
    return name in reduction.NORMS
