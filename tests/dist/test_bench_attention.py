"""`weft bench attention`: all systems give the right values, and a rank's bytes and memory fall."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from bench.attention import _counted, _on_rank
from bench.attention_ranks import PROGRAMS, SYSTEMS, measure
from tests.gloo import GlooWorld


def measured(mesh: Any, name: str) -> Any:
    return measure(PROGRAMS[name], 40, 1, mesh)


@pytest.mark.parametrize("name", ["1 head, causal", "4 heads"])
def test_every_system_on_four_ranks(gloo: GlooWorld, name: str) -> None:
    found, fault = gloo.run(measured, {"x": 4}, name)[0]
    missing = {"zig-zag"} if name == "4 heads" else set()
    assert {*found} == {*SYSTEMS} - missing - ({"DTensor"} if fault is not None else set())


def test_bytes_and_memory() -> None:
    program, length = PROGRAMS["1 head, causal"], 4096
    alone, _ = _counted(program.operands(length), program.attend)
    found = weft.testing.run(lambda mesh: _on_rank(mesh, program, length), mesh={"x": 4})
    assert max([peak for peak, _ in found]) <= 0.4 * alone
    block = length // 4 * 64 * 4 * 2  # keys and values; a rank sees those before its own twice
    assert [nbytes // block for _, nbytes in found] == [3, 4, 5, 6]
