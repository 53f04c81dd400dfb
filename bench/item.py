"""What is measured of an item: the times of systems that do it, and the figures to reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench.timing import Times, interleave

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure to reach: what was measured against the most that it may be."""

    what: str
    value: float
    limit: float
    unit: str = "x"

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """An item's outcome: microseconds per system, and its figures."""

    name: str
    times_us: Mapping[str, float]
    figures: list[Figure] = field(default_factory=list)
    note: str = ""


def timed(
    name: str,
    systems: Mapping[str, Run],
    num_rounds: int,
    judge: Callable[[Times], list[Figure]] = lambda times: [],
    note: str = "",
) -> Row:
    """Time the systems side by side and judge the times."""
    times = interleave(systems, num_rounds)
    return Row(name, {system: times.median(system) for system in systems}, judge(times), note)
