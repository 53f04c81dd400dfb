"""Recipes for ever new sizes and rates do not pile up."""

from __future__ import annotations

import weft
from bench.memory import BYTES_PER_STEP, kept_bytes_per_step

NUM_STEPS = 4_000


def test_ever_new_sizes_do_not_fill_the_memory() -> None:
    (kept,) = weft.testing.run(lambda mesh: kept_bytes_per_step(mesh, NUM_STEPS), 1, {"x": 1})
    assert kept <= BYTES_PER_STEP, f"{kept:.0f} bytes stay behind at every step"
