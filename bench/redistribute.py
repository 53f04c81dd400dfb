"""Redistribution over gloo processes: `weft bench redistribute`, as an item among the others.

Here times are wall times of the slowest rank, not CPU time.
"""

from __future__ import annotations

from bench.item import Figure, Item, Row
from weft.cli.bench.command import measured_rows
from weft.cli.bench.measured import Measured
from weft.cli.bench.rows import ROWS

SIZE = 1 << 20


def _row(it: Measured) -> Row:
    systems = ("by hand", "weft", "DTensor")
    names = [it.hand("forward") if system == "by hand" else system for system in systems]
    times = {system: 1e3 * it.milliseconds("forward", name)
             for system, name in zip(systems, names) if name in it.forward}
    figures = [Figure(each.what, each.value, each.limit) for each in it.figures()]
    return Row(f"{it.row} on {it.num_ranks}", times, figures)


def _measure(num_rounds: int) -> list[Row]:
    measured = measured_rows([row.name for row in ROWS], [SIZE], min(num_rounds, 11))
    return [_row(it) for it, _ in measured]


ITEM = Item("redistribute", _measure)
