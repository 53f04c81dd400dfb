"""Recipes for ever new sizes and rates do not pile up."""

from __future__ import annotations

import pytest

import weft
from bench.memory import TO_FIRST_HALF, growth
from weft.tensor import meta


def test_ever_new_sizes_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for fewer layouts than half of the steps bring, the second half adds nothing."""
    monkeypatch.setattr(meta, "MAX_METAS", 128)
    (grown,) = weft.testing.run(lambda mesh: growth(mesh, 600), 1, {"x": 1})
    assert grown <= TO_FIRST_HALF
