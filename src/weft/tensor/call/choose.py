"""How one op is carried out: by the user's rule, else by its entry in the book."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft import ops, propagate, rules
from weft.core import Layout
from weft.rules import Call, Decision, Rule
from weft.tensor.trace.calls import Facts
from weft.tensor.trace.trees import map_tensors
from weft.transport.order import full_order, in_order

__all__ = ["choose"]

Chosen = Decision | ops.Local | ops.Kernel | ops.Composite | None
"""The way in which an op is carried out; None if neither a rule nor an entry covers the call."""


def choose(
    call: Call, entry: rules.Entry, about: Facts, layouts: list[Layout], wants: list[bool],
    results: Sequence[torch.Tensor], target: int | None, slices: propagate.Slices = (),
) -> tuple[Chosen, Rule | None, rules.OwnRule | None]:
    """Choose for a call whose operands have these layouts. Also the rule that gives the lengths of
    the results, if there is one, and a user's registration for the op.

    Args:
        entry: the op's entry in the book.
        wants: per operand, whether a gradient is wanted.
        results: the results of the op on meta tensors.
        target: the operand that an op in place writes to.
        slices: per operand, its base if it is a slice.
    """
    own = rules.OWN.get(call.op)
    bound = None if own is None else own.bind(call, True)
    if own is not None and bound is not None:
        rule, _ = bound
        return _decided(rule, call, layouts, wants, None, own.kernel, slices), rule, own
    given = None if entry.layouts is None else entry.layouts(call, layouts, wants)
    covering: Iterable[Rule] = entry.covering(call, wants)
    if isinstance(given, Rule):
        given, covering = None, [given]
    for rule in covering:
        found = given or _decided(rule, call, layouts, wants, target, entry.kernel, slices)
        if given is not None or isinstance(found, ops.Kernel) or not rule.needs_kernel:
            return _in_order(found, about, results), rule, own
    if given is None and entry.compose is not None:
        if not entry.each_call and all(layout.is_replicated for layout in layouts):
            return ops.replicated(call, layouts), None, own
        given = ops.Composite(entry.compose, entry.each_call, entry.writes)
    return _in_order(given, about, results), None, own


def _in_order(given: Chosen, about: Facts, results: Sequence[torch.Tensor]) -> Chosen:
    """A composition that is recorded leaves results in the memory order of the op's own, on meta
    tensors of the global shape: the stride order is part of a result."""
    if not isinstance(given, ops.Composite) or given.each_call or about.is_view or about.writes:
        return given
    orders = [(one.dim(), full_order(one.shape, one.stride())) for one in results]
    function = given.function

    def run(*args: Any, **kwargs: Any) -> Any:
        feed = iter(orders)

        def lay(one: torch.Tensor) -> torch.Tensor:
            ndim, order = next(feed)
            return in_order(one, order) if one.dim() == ndim else one

        return map_tensors(lay, function(*args, **kwargs))

    return replace(given, function=run)


def _decided(
    rule: Rule, call: Call, layouts: list[Layout], wants: list[bool], target: int | None,
    kernel: Callable[..., object] | None, slices: propagate.Slices,
) -> Decision | ops.Kernel:
    """The decision of the rule for the call, carried out by the op itself or by its kernel."""
    decision = propagate.decide(rule, call, layouts, wants, target, slices)
    if not decision.finish:
        return decision
    assert kernel is not None
    return ops.Kernel.of(decision, kernel)
