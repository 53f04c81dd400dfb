"""What was measured of one redistribution, and what it says."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.item import Figure

__all__ = ["FROM_NBYTES", "TO_DTENSOR", "TO_DTENSOR_MINIMAL", "TO_HAND", "Measured"]

TO_HAND = 1.15
"""At most so many times the best that was written by hand."""
TO_DTENSOR, TO_DTENSOR_MINIMAL = 1.0, 1.05
"""At most so many times DTensor, and where that moves the fewest bytes itself."""
FROM_NBYTES = 1_000_000
"""Times are judged from this size on."""

Times = Mapping[str, Mapping[str, Sequence[float]]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of one size: per system the bytes received by all ranks, and rounds of times."""

    row: str
    num_ranks: int
    nbytes: int
    minimum: int | None
    received: Mapping[str, int | None]
    faults: Mapping[str, str]
    forward: Times
    both: Times

    @property
    def by_hand(self) -> list[str]:
        """The systems that are written by hand."""
        return [name for name in self.forward if name not in ("weft", "DTensor")]

    def milliseconds(self, way: str, system: str) -> float:
        """Median over the rounds of what the slowest rank took."""
        return 1e3 * statistics.median(getattr(self, way)[system]["seconds"])

    def hand(self, way: str) -> str:
        """The faster one of what is written by hand."""
        return min(self.by_hand, key=lambda name: self.milliseconds(way, name))

    def ratio(self, way: str, to: str, clock: str = "seconds") -> float | None:
        """weft's time to another system's: the median of the rounds' ratios."""
        times: Times = getattr(self, way)
        if to not in times:
            return None
        pairs = zip(times["weft"][clock], times[to][clock])
        return statistics.median(mine / other for mine, other in pairs)

    def excess(self, system: str) -> float | None:
        """Bytes received, as a multiple of the fewest possible."""
        received = self.received.get(system)
        return received / self.minimum if received is not None and self.minimum else None

    def figures(self) -> list[Figure]:
        """What is to be reached, and was or was not."""
        found = []
        if self.minimum is not None:
            found.append(Figure("bytes, to the fewest", self.excess("weft") or 0.0, 1.0))
        if self.nbytes < FROM_NBYTES:
            return found
        minimal = (self.excess("DTensor") or 1.0) <= 1.0
        limits = [("DTensor", TO_DTENSOR_MINIMAL if minimal else TO_DTENSOR)]
        for way in ("forward", "both"):
            for to, limit in [(self.hand(way), TO_HAND), *limits]:
                value = self.ratio(way, to)
                if value is not None:
                    what = "forward" if way == "forward" else "forward and backward"
                    found.append(Figure(f"{what}, time to {to}", value, limit))
        return found
