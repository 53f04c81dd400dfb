"""How much of what could be tried a test run tries: `WEFT_EFFORT=1 make test` tries all."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

EFFORT = float(os.environ.get("WEFT_EFFORT", "0.34"))
"""The share that is tried where there is much to choose from; more than 1 draws more layouts."""


def drawn(rows: Sequence[T]) -> list[T]:
    """All rows, or a seeded sample of that share, in their order."""
    count = min(len(rows), math.ceil(EFFORT * len(rows)))
    return [rows[at] for at in sorted(random.Random(len(rows)).sample(range(len(rows)), count))]
