"""Recipes for ever new sizes and rates do not pile up."""

from __future__ import annotations

import pytest

import weft
from bench.memory import TO_FIRST_HALF, growth
from weft.tensor import meta
from weft.tensor.call import build


@pytest.mark.parametrize("limit, num_steps, is_bounded", [(128, 2400, True), (10**9, 600, False)])
def test_memory_of_ever_new_sizes(
    monkeypatch: pytest.MonkeyPatch, limit: int, num_steps: int, is_bounded: bool
) -> None:
    """With room for fewer layouts than half of the steps bring, the second half adds nothing.

    Without a bound it does: the measurement sees it.
    """
    monkeypatch.setattr(meta, "MAX_METAS", limit)
    monkeypatch.setattr(build, "MAX_STRUCTURES", limit)
    (grown,) = weft.testing.run(lambda mesh: growth(mesh, num_steps), 1, {"x": 1})
    assert (grown <= TO_FIRST_HALF) == is_bounded, grown
