"""Interleaved timing: in every round each system takes its turn, so that drift hits all alike; and
what is measured of an item, as rows with figures to reach.

A turn has the same number of calls for every system: its first call finds the processor's caches
full of what the system before it did, and costs more. Turns of one length would charge that to a
slow system once per call, and to a fast one once in two or three.

What is read is the thread's CPU time, so that other processes of a busy machine count for less.
Nothing here waits or runs on other threads, so on an idle machine it is the wall time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Run = Callable[[], object]

TURN_NS = 10_000_000
"""How long the slowest system runs in a row, about."""


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of CPU time per call: one entry per round and system."""

    rounds: Mapping[str, list[float]]

    def median(self, system: str) -> float:
        """Median over the rounds, in microseconds."""
        return statistics.median(self.rounds[system]) / 1e3

    def ratio(self, system: str, to: str) -> float:
        """Median of the rounds' ratios: what two neighbours in time say of each other."""
        pairs = zip(self.rounds[system], self.rounds[to])
        return statistics.median(mine / other for mine, other in pairs)

    def over(self, system: str, base: str) -> float:
        """Median of the rounds' differences, in microseconds."""
        pairs = zip(self.rounds[system], self.rounds[base])
        return statistics.median(mine - other for mine, other in pairs) / 1e3


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


def interleave(systems: Mapping[str, Run], num_rounds: int) -> Times:
    """Time every system `num_rounds` times, round robin, after a warm-up, without the collector."""
    calls = min(_calls_per_turn(run) for run in systems.values())
    rounds: dict[str, list[float]] = {name: [] for name in systems}
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_rounds):
            for name, run in systems.items():
                rounds[name].append(_turn(run, calls))
            gc.collect(0)
    finally:
        gc.enable()
    return Times(rounds)


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


def once(run: Run) -> float:
    """Nanoseconds of a single call."""
    start = time.thread_time_ns()
    run()
    return float(time.thread_time_ns() - start)


def _turn(run: Run, calls: int) -> float:
    start = time.thread_time_ns()
    for _ in range(calls):
        run()
    return (time.thread_time_ns() - start) / calls


def _calls_per_turn(run: Run) -> int:
    for _ in range(20):
        run()
    return max(1, int(TURN_NS / max(_turn(run, 10), 1.0)))
