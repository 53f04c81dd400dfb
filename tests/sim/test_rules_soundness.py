"""A fixed sample of `make soundness`, and that it finds what is wrong."""

from __future__ import annotations

import pytest
import torch

from tests.cases.calls import CALLS
from tests.effort import EFFORT
from tests.soundness.calls import AtenCall, calls_of
from tests.soundness.judge import faults
from weft import ops
from weft.rules import op, rule

ENTRIES = (
    "add", "sum", "nn.functional.linear", "cat", "movedim", "var", "prod", "masked_fill",
    "nn.functional.mse_loss", "diagonal", "repeat", "roll", "bmm", "addcmul", "amax", "where",
)


@pytest.mark.parametrize("entry", ENTRIES)
def test_rules_are_sound(entry: str) -> None:
    calls = sorted(calls_of(entry, torch.float64, 4), key=lambda it: -len(str(it.form())))
    assert calls
    for call in calls[:2]:
        assert faults(call, every=37) == []


@pytest.mark.parametrize("name", CALLS)
def test_rules_of_ops_outside_the_database(name: str) -> None:
    overload, *args = CALLS[name]()
    call = AtenCall(f"aten.{name}", overload, tuple(args), {})
    assert faults(call, every=max(1, round(1 / EFFORT))) == []


def test_padding_that_keeps_the_cuts() -> None:
    """One end loses what the other gains, beside a shard that is empty."""
    (call,) = [it for it in calls_of("constant_pad_nd", torch.float64, 8)
               if it.args[0].shape == (1, 3, 4, 4)]
    assert faults(call) == []


def test_a_planted_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops.BOOK, "aten.exp", op("exp", rule("... -> ...", linear=[0])))
    (call, *_) = [it for it in calls_of("exp", torch.float64, 4) if it.form()[1][0][0]]
    assert faults(call, every=5)


def test_calls_go_by_all_names() -> None:
    assert {it.op for it in calls_of("acos", torch.float64, 1, aliases=True)} == {
        "aten.acos", "aten.arccos"}
