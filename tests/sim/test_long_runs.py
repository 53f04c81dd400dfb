"""Nothing grows with the steps: `python -m tests.long_runs` has thousands of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests import long_runs
from tests.effort import drawn


@pytest.mark.parametrize("kind", drawn([kind for kind in long_runs.KINDS if kind != "experts"]))
def test_nothing_grows_with_the_steps(kind: str) -> None:
    long_runs.grown(kind, (12, 24)).check(kind, alone=False)


def test_what_grows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    step = long_runs._step

    def leaking(how: Any, model: Any, optimizer: Any, ids: Any) -> None:
        step(how, model, optimizer, ids)
        kept.append(ids)

    monkeypatch.setattr(long_runs, "_step", leaking)
    with pytest.raises(AssertionError, match="tensors"):
        long_runs.grown("data parallel", (12, 24)).check("data parallel")
