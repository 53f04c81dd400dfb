"""Measured redistributions as a table of text."""

from __future__ import annotations

from collections.abc import Sequence

from bench.redistribution.measured import (
    FROM_NBYTES,
    TO_DTENSOR,
    TO_DTENSOR_MINIMAL,
    TO_HAND,
    Measured,
)

__all__ = ["header", "line", "summary"]

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
