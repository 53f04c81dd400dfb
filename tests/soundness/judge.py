"""One call in every way."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from tests.rule_of import rule_of
from tests.soundness.calls import AtenCall, calls_of
from tests.soundness.journal import Checked
from weft.core import Layout, Mesh
from weft.own.check import BruteForce
from weft.own.trials import Trial
from weft.rules import Call, Rule, TensorArg
from weft.tensor.trace.calls import call_of

__all__ = ["faults", "of_entry"]


@dataclass(frozen=True, slots=True)
class _OfTable:
    """A rule of the table, for one call."""

    name: str
    overload: Any

    def bind(self, call: Call, results_known: bool) -> tuple[Rule, tuple[TensorArg, ...]]:
        """The rule; one that asks for nothing where cuts decide, or an algorithm serves."""
        call = call_of(self.overload, call.args, dict(call.kwargs), call.results)
        mesh = Mesh({"x": 1})
        rule = rule_of(call, [Layout.replicated(mesh, one.shape) for one in call.tensors])
        if not isinstance(rule, Rule) or len(rule.operands) != len(call.tensors):
            rule = Rule((None,) * len(call.tensors), ((),) * len(call.results), {})
        return rule, call.results


class _OfCall(BruteForce):
    """The call as weft carries it out, by a rule or otherwise."""

    num_ways = 0

    def chosen(self, trial: Trial) -> tuple[str, ...]:
        """All faults of a call are one."""
        self.num_ways += 1  # it is asked of each trial, once
        return ()


def faults(call: AtenCall, every: int = 1) -> list[str]:
    """What is wrong with the call in some way; every n-th way is tried."""
    return _tried(call, every)[1]


def _tried(call: AtenCall, every: int) -> tuple[int, list[str]]:
    """In how many ways the call was tried, and its faults."""
    rule = _OfTable(str(call.overload), call.overload)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            brute = _OfCall(rule, call.overload, call.args, call.kwargs)
        except (RuntimeError, NotImplementedError):  # the plain call itself: torch has none
            return 0, []
        found = list(brute.faults(every).values())
    return brute.num_ways, found


def of_entry(job: tuple[str, int, int]) -> Checked:
    """What is wrong with the calls of one entry of the database."""
    entry, most, every = job
    torch.set_num_threads(1)
    found: list[tuple[str, str, int, list[str]]] = []
    of_op: Counter[str] = Counter()
    for dtype in (torch.float64, torch.int64, torch.bool):
        calls = [call for call in calls_of(entry, dtype, aliases=True) if of_op[call.op] < most]
        # Those of more dims first: they have more ways.
        for call in sorted(calls, key=lambda it: -it.ndim()):
            if of_op[call.op] < most:
                of_op[call.op] += 1
                said = "".join(f" {tuple(shape)} {dtype}" for shape, dtype in call.form()[1])
                try:
                    found.append((call.op, said, *_tried(call, every)))
                except Exception as error:
                    found.append((call.op, said, 0, [f"{type(error).__name__}: {error}"]))
    return Checked(entry, most, every, found)
