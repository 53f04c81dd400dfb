"""What was measured of redistributions, what it says, and the table of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.timing import Figure

__all__ = ["Measured", "header", "line", "summary"]

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


_WIDTHS = (23, 11, 6, 8, 8, 7, 8, 6, 8, 6, 8)

_HEADS = (
    ("", "bytes", "", "", "forward, ms", "", "", "weft to", "", "and back", ""),
    ("", "missing", "weft", "DTensor", "by hand", "weft", "DTensor", "hand", "DTensor", "hand",
     "DTensor"),
)


def header(num_ranks: int, nbytes: int, num_rounds: int) -> str:
    """What stands above the rows of one size."""
    size = f"{nbytes / 2**20:g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:g} KiB"
    lines = [f"{num_ranks} ranks, {size} of float32, {num_rounds} rounds"]
    return "\n".join([*lines, *map(_joined, _HEADS)])


def line(it: Measured) -> str:
    """One row."""
    hand = it.hand("forward")
    cells = [
        it.row, "-" if it.minimum is None else f"{it.minimum:,}",
        *(_excess(it, system) for system in ("weft", "DTensor")),
        *(_ms(it, system) for system in (hand, "weft", "DTensor")),
    ]
    for way in ("forward", "both"):
        cells += [_ratio(it.ratio(way, it.hand(way))), _ratio(it.ratio(way, "DTensor"))]
    return _joined(cells)


def summary(rows: Sequence[Measured]) -> str:
    """What the columns mean, and how many figures were met."""
    figures = [(it, figure) for it in rows for figure in it.figures()]
    missed = [
        f"  {it.row}, {it.nbytes:,} bytes: {figure.what} {figure.value:.2f}, at most "
        f"{figure.limit:g}"
        for it, figure in figures if not figure.is_met
    ]
    return "\n".join([
        "Bytes are those that all ranks receive, counted as torch.distributed is given them, as a",
        "multiple of those that they lack. By hand: the faster of an all_to_all_single and torch's",
        "own collective for the row. Times: medians over the rounds, of the slowest rank; ratios",
        "are medians of the rounds' ratios.",
        f"To reach: 1.00 of the bytes; from {FROM_NBYTES:,} bytes on at most {TO_HAND:g} of the "
        f"time by hand, and of",
        f"DTensor's {TO_DTENSOR_MINIMAL:g} where that moves the fewest bytes too, else "
        f"{TO_DTENSOR:g}.",
        f"{len(figures) - len(missed)} of {len(figures)} figures met", *missed,
    ])


def _excess(it: Measured, system: str) -> str:
    if system in it.faults:
        return it.faults[system]
    value = it.excess(system)
    return "-" if value is None else f"{value:.2f}"


def _ms(it: Measured, system: str) -> str:
    return f"{it.milliseconds('forward', system):.2f}" if system in it.forward else "-"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _joined(cells: Sequence[str]) -> str:
    first, *rest = (
        cell.rjust(width) if place else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, _WIDTHS))
    )
    return "".join([first, *rest]).rstrip()
