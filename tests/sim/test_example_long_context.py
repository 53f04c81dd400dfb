"""The example of a long context, in miniature: losses, and the budget that one process breaks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import weft
from demo.text import Corpus

EXAMPLE = Path(__file__).parents[2] / "examples" / "long_context.py"
LENGTH, STEPS, BUDGET = 301, 2, 3_500_000


@pytest.fixture(scope="module")
def long_context() -> Any:
    spec = importlib.util.spec_from_file_location("long_context", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["long_context"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ranks_stay_within_the_budget_that_stops_one_process(long_context: Any) -> None:
    corpus = Corpus([EXAMPLE])

    def on_rank(mesh: Any) -> list[Any]:
        steps = list(long_context.sharded(corpus, LENGTH, STEPS, mesh).steps(BUDGET))
        blocks = steps[-1].received["aten.scaled_dot_product_attention.default", "forward"]
        others = mesh.get_rank() * 76 * 32 * 2 * 4  # earlier keys and values of one head
        assert blocks == 2 * others  # in each layer
        return [step.loss for step in steps]

    due = [step.loss for step in long_context.alone(corpus, LENGTH, STEPS).steps()]
    for found in weft.testing.run(on_rank, mesh={"sequence": 4}):
        assert long_context.apart(found, due) < 1e-6
    stopped = long_context.reached(long_context.alone(corpus, LENGTH, 1), BUDGET)
    assert stopped is not None and stopped > BUDGET
    assert long_context.reached(long_context.alone(corpus, LENGTH, 1), 10 * BUDGET) is None
