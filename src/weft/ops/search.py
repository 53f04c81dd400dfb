"""`searchsorted` and `bucketize` among numbers that are cut: a sum of counts, or the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from weft import propagate, rules
from weft.core import Layout
from weft.rules import Call, Decision, Rule

__all__ = ["search_lookup"]


def search_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Decision | None:
    """Places among cut numbers: terms, counts of how many are less; or the numbers whole, if fewer

    The reduction of terms receives the result, twice.
    """
    among = call.args[0 if call.op.startswith("aten.searchsorted.") else 1]
    place = next(at for at, tensor in enumerate(call.tensors) if tensor is among)
    rule = rules.lookup(call, layouts)
    if not layouts[place].dims[-1] or not isinstance(rule, Rule):
        return None
    if math.prod(among.shape) <= math.prod(call.results[0].shape):
        rule = replace(rule, reduce={}, whole=rule.whole | {"among"})
    decision = propagate.decide(rule, call, layouts, wants_grad)
    return replace(decision, by_form=False)  # lengths are compared
