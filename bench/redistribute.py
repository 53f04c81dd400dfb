"""`weft bench redistribute`, and the same as an item of `weft bench calls`.

Here times are wall times of the slowest rank, not CPU time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from bench.options import read_sizes
from bench.redistribution import table
from bench.redistribution.rows import ROWS
from bench.redistribution.table import Measured
from bench.timing import Row
from weft.cli.launch import events
from weft.cli.terminal import RefusedError, explained

__all__ = ["measure", "redistribute"]

SIZE = 1 << 20

_RANKS = str(Path(__file__).parent / "redistribution" / "ranks.py")


@click.command()
@click.option("--sizes", default="1MiB", show_default=True, callback=read_sizes,
              help="Bytes of the whole tensor: 64KiB,1MiB,16MiB.")
@click.option("--rounds", default=11, show_default=True, type=click.IntRange(min=1),
              help="Rounds of the interleaving.")
@click.option("--row", "names", multiple=True, metavar="TEXT",
              help="Only rows whose names contain this; may be repeated.")
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False),
              help="Write all rounds as JSON.")
@explained
def redistribute(
    sizes: list[int], rounds: int, names: tuple[str, ...], path: Path | None
) -> None:
    """Bytes and time of redistribution, beside torch's.

    Starts 4 and then 8 gloo ranks on this machine. Each row is done by weft, by torch's DTensor, by
    one all_to_all_single with split sizes, and by torch's own collective where it has one, forward
    and forward with backward, in turns.
    """
    rows = [row.name for row in ROWS if not names or any(name in row.name for name in names)]
    if not rows:
        raise RefusedError(
            "weft bench redistribute --row", f"none of {len(ROWS)} rows contains "
            f"{', '.join(map(repr, names))}", "a row is chosen by a part of its name",
            [row.name for row in ROWS], "--row 'S0 -> S1'")
    seen: list[Measured] = []
    raw: list[dict[str, Any]] = []
    above: tuple[int, int] | None = None
    for it, event in _measured_rows(rows, sizes, rounds):
        size = min(sizes, key=lambda size: abs(size - it.nbytes))
        if above != (it.num_ranks, size):
            click.echo(("\n" if seen else "") + table.header(it.num_ranks, size, rounds))
            above = (it.num_ranks, size)
        click.echo(table.line(it))
        seen.append(it)
        raw.append(event)
    click.echo(f"\n{table.summary(seen)}")
    if path is not None:
        path.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
        click.echo(f"written to {path}")


def _measured_rows(
    names: Sequence[str], sizes: Sequence[int], num_rounds: int
) -> Iterator[tuple[Measured, dict[str, Any]]]:
    """The rows of these names at each size, as ranks on this machine measure them.

    Raises:
        RanksFailed: one of them failed.
    """
    for num_ranks in sorted({row.mesh.size() for row in ROWS if row.name in names}):
        for size in sizes:
            asked = {"num_ranks": num_ranks, "rows": list(names), "sizes": [size],
                     "num_rounds": num_rounds}
            for event in events(num_ranks, _RANKS, asked):
                yield Measured(**event), event


def _row(it: Measured) -> Row:
    systems = ("by hand", "weft", "DTensor")
    names = [it.hand("forward") if system == "by hand" else system for system in systems]
    times = {system: 1e3 * it.milliseconds("forward", name)
             for system, name in zip(systems, names) if name in it.forward}
    return Row(f"{it.row} on {it.num_ranks}", times, it.figures())


def measure(num_rounds: int) -> list[Row]:
    measured = _measured_rows([row.name for row in ROWS], [SIZE], min(num_rounds, 11))
    return [_row(it) for it, _ in measured]
