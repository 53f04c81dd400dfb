"""`weft bench calls`: the cost of a call, side by side."""

from __future__ import annotations

from collections.abc import Callable
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
from bench import calls as one_call
from bench.item import Row

__all__ = ["ITEMS", "calls"]

ITEMS: dict[str, Callable[[int], list[Row]]] = {
    "calls": one_call.measure,
    "mlp": mlp.measure,
    "block": block.measure,
    "adamw": optimizer.measure,
    "first": first.measure,
    "memory": memory.measure,
    "redistribute, host": host.measure,
    "redistribute": redistribute.measure,
    "draws": draws.measure,
    "models": models.measure,
    "lengths": lengths.measure,
}
"""Name of an item -> what measures it in so many rounds."""


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
            measured[name] = ITEMS[name](rounds)
        report.show(console, name, measured[name])
    figures = [figure for rows in measured.values() for row in rows for figure in row.figures]
    met = sum(figure.is_met for figure in figures)
    console.print(f"{met} of {len(figures)} figures met")
    if json_path is not None:
        report.write_json(json_path, measured, rounds)
        console.print(f"written to {json_path}")
