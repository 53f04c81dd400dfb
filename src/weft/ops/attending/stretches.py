"""The positions of the tokens in an interval of a sequence whose tokens are out of order.

An order is the spans of positions of which the sequence consists, one after the other; None is the
order of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core import Interval

__all__ = ["Order", "Stretch", "positions", "stretches"]

Order = tuple[Interval, ...] | None


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows of a tensor, from `row` on, that have consecutive positions from `position` on."""

    row: int
    num: int
    position: int

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.position + self.num

    def of(self, x: Tensor) -> Tensor:
        """Its part of a tensor whose rows are the last dim but one."""
        return x if self.num == x.shape[-2] else x.narrow(-2, self.row, self.num)


def stretches(interval: Interval, order: Order) -> tuple[Stretch, ...]:
    """Those of an interval, of which there is at least one; an empty one of an empty interval."""
    start, stop = interval
    if order is None:
        return (Stretch(0, stop - start, start),)
    found, at = [], 0
    for first, last in order:
        low, high = max(start, at), min(stop, at + last - first)
        if low < high:
            found.append(Stretch(low - start, high - low, first + low - at))
        at += last - first
    return tuple(found) or (Stretch(0, 0, start),)


def positions(found: Sequence[Stretch], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(one.position, one.stop, device=device) for one in found])
