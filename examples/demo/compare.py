"""How far the losses of two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

from demo.train import Step

__all__ = ["TOLERANCE", "differences"]

TOLERANCE = 1e-4
"""How far two float32 losses of a step may be apart, as a part of the loss."""


def differences(ranks: Sequence[Step], single: Sequence[Step]) -> list[float]:
    """Per step, the difference relative to the single process; infinite where one is no number.

    Empty when there was no single process.
    """
    apart = [abs(one.loss - other.loss) / abs(other.loss) for one, other in zip(ranks, single)]
    return [each if math.isfinite(each) else math.inf for each in apart]
