"""A fixed sample of `make soundness`, and that it finds what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.soundness.calls import calls_of
from tests.soundness.judge import faults
from weft.rules import Call, Rule, pointwise, table

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


def test_padding_that_keeps_the_cuts() -> None:
    """One end loses what the other gains, beside a shard that is empty."""
    (call,) = [it for it in calls_of("constant_pad_nd", torch.float64, 8)
               if it.args[0].shape == (1, 3, 4, 4)]
    assert faults(call) == []


def test_a_planted_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(call: Call) -> Rule:
        return pointwise.elementwise(call, ((0,),))

    rules: Any = {**table.RULES, "aten.exp": linear}
    monkeypatch.setattr(table, "RULES", rules)
    (call, *_) = [it for it in calls_of("exp", torch.float64, 4) if it.form()[1][0][0]]
    assert faults(call, every=5)


def test_calls_go_by_all_names() -> None:
    assert {it.op for it in calls_of("acos", torch.float64, 1, aliases=True)} == {
        "aten.acos", "aten.arccos"}
