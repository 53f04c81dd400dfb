"""One call in every way."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from tests.soundness.calls import AtenCall
from weft.own.check import BruteForce
from weft.own.trials import Trial
from weft.rules import Call, Rule, TensorArg
from weft.rules.table import RULES

__all__ = ["faults"]


@dataclass(frozen=True, slots=True)
class _OfTable:
    """A rule of the table, for one call."""

    name: str
    op: str

    def bind(self, call: Call, results_known: bool) -> tuple[Rule, tuple[TensorArg, ...]]:
        """The rule; one that asks for nothing where cuts decide, or an algorithm serves."""
        rule = RULES[self.op](call) if self.op in RULES else None
        if rule is None or len(rule.operands) != len(call.tensors):
            rule = Rule((None,) * len(call.tensors), ((),) * len(call.results), {})
        return rule, call.results


class _OfCall(BruteForce):
    """The call as weft carries it out, by a rule or otherwise."""

    def chosen(self, trial: Trial) -> tuple[str, ...]:
        """All faults of a call are one."""
        return ()


def faults(call: AtenCall, every: int = 1) -> list[str]:
    """What is wrong with the call in some way; every n-th way is tried."""
    rule = _OfTable(str(call.overload), call.op)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(_OfCall(rule, call.overload, call.args, call.kwargs).faults(every).values())
