"""The rule or decision of a call, where the op itself runs on the local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from weft.core import Layout
from weft.ops import find
from weft.rules import Call, Decision, Rule


def rule_of(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool] = ()
) -> Rule | Decision | None:
    """The rule or decision of a call whose op itself runs on the local tensors, without a kernel
    or a composition; a composition that layouts ask for leaves the rule as right as it is."""
    entry, wants_grad = find(call.op), wants_grad or [False] * len(layouts)
    unknown, call = call, replace(call, layouts=tuple(layouts))
    if entry is None:
        return None
    given = None if entry.layouts is None else entry.layouts(call, layouts, wants_grad)
    if isinstance(given, Decision):
        return given
    both = chain.from_iterable(entry.covering(one, wants_grad) for one in (call, unknown))
    rule = next((one for one in both if not one.needs_kernel), None)
    if rule is None or not rule.finish:
        return rule
    finished = {factor for _, factor in rule.finish}
    return replace(rule, finish=frozenset(), whole=rule.whole | finished)
