"""Recipes for ever new sizes and rates do not pile up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.memory import TO_FIRST_HALF

ALONE = """
import gc
import sys
import weft
from bench.memory import growth
from weft.tensor import meta
from weft.tensor.call import build

limit, num_steps = map(int, sys.argv[1:])
meta.MAX_METAS = build.MAX_STRUCTURES = limit
gc.freeze()  # what is imported grows no more, and each of the forty collections would read it
print(*weft.testing.run(lambda mesh: growth(mesh, num_steps), 1, {"x": 1}))
"""


@pytest.mark.parametrize("limit, num_steps, is_bounded", [(64, 1200, True), (10**9, 120, False)])
def test_memory_of_ever_new_sizes(limit: int, num_steps: int, is_bounded: bool) -> None:
    """With room for fewer layouts than half of the steps bring, the second half adds nothing.

    Without a bound it does: the measurement sees it. In a process of its own: what other tests have
    left in a table is copied when it grows, which looks like growth.
    """
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(limit), str(num_steps)], check=True, timeout=100,
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True,
    )
    grown = float(done.stdout)
    assert (grown <= TO_FIRST_HALF) == is_bounded, grown
