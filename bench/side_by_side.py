"""`weft bench calls`: the cost of a call, side by side."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from bench import (
    block,
    draws,
    first,
    host,
    lengths,
    memory,
    mlp,
    models,
    optimizer,
    redistribute,
    report,
    world,
)
from bench.calls import ITEM as CALLS
from bench.item import Item, Row

__all__ = ["ITEMS", "calls"]

ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        CALLS, mlp.ITEM, block.ITEM, optimizer.ITEM, first.ITEM, memory.ITEM, host.ITEM,
        redistribute.ITEM, draws.ITEM, models.ITEM, lengths.ITEM,
    )
}


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(ITEMS)), help="Measure these alone.")
@click.option("--rounds", default=31, show_default=True, help="Rounds of the interleaving.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all as JSON.")
def calls(only: tuple[str, ...], rounds: int, json_path: Path | None) -> None:
    """The cost of a call beside plain torch, a no-op wrapper, hand-written SPMD and DTensor."""
    world.start()
    console = Console()
    console.print(report.HEADER.format(ranks=world.NUM_RANKS, rounds=rounds), style="dim")
    measured: dict[str, list[Row]] = {}
    for name in only or ITEMS:
        with console.status(name):
            measured[name] = ITEMS[name].measure(rounds)
        report.show(console, name, measured[name])
    figures = [figure for rows in measured.values() for row in rows for figure in row.figures]
    met = sum(figure.is_met for figure in figures)
    console.print(f"{met} of {len(figures)} figures met")
    if json_path is not None:
        report.write_json(json_path, measured, rounds)
        console.print(f"written to {json_path}")
