"""`weft bench calls`: the cost of a call, side by side, as tables and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from bench import (
    block,
    draws,
    first,
    host,
    memory,
    mlp,
    models,
    optimizer,
    redistribute,
    world,
)
from bench import calls as one_call
from bench.timing import Figure, Row

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
    "lengths": models.measure_lengths,
}
"""Name of an item -> what measures it in so many rounds."""

_HEADER = (
    "One process, one thread, rank 0 of a world of {ranks} whose collectives return at once "
    '(torch\'s "fake" backend), for every system alike: what is timed is the work of the '
    "process, as CPU time.\nAll items took five minutes on two cores; --only calls takes "
    "seconds.\nMedians of {rounds} interleaved rounds; ratios and differences are "
    "medians over the rounds."
)


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(ITEMS)), help="Measure these alone.")
@click.option("--rounds", default=31, show_default=True, help="Rounds of the interleaving.")
@click.option("--targets", is_flag=True,
              help="Say as well whether the targets of weft's authors are met.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all as JSON.")
def calls(only: tuple[str, ...], rounds: int, targets: bool, json_path: Path | None) -> None:
    """The cost of a call beside plain torch, a no-op wrapper, hand-written SPMD and DTensor."""
    world.start()
    console = Console()
    console.print(_HEADER.format(ranks=world.NUM_RANKS, rounds=rounds), style="dim")
    measured: dict[str, list[Row]] = {}
    for name in only or ITEMS:
        with console.status(name):
            measured[name] = ITEMS[name](rounds)
        _show(console, name, measured[name], targets)
    if targets:
        figures = [figure for rows in measured.values() for row in rows for figure in row.figures]
        met = sum(figure.is_met for figure in figures)
        console.print(f"{met} of {len(figures)} figures met")
    if json_path is not None:
        _write_json(json_path, measured, rounds)
        console.print(f"written to {json_path}")


def _show(console: Console, item: str, rows: list[Row], targets: bool) -> None:
    """One table an item: microseconds per system, the ratio to plain, the figures that follow."""
    systems = list(dict.fromkeys(system for row in rows for system in row.times_us))
    if len(rows) == 1:
        table = _one_row(item, rows[0], targets)
    else:
        table = Table(title=item, title_justify="left")
        table.add_column("µs")
        for system in systems:
            table.add_column(system, justify="right")
        table.add_column("figures")
        for row in rows:
            times = [_number(row.times_us.get(system)) for system in systems]
            table.add_row(row.name, *times, _figures(row, targets))
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"  {row.name}: {row.note}", style="dim")


def _one_row(item: str, row: Row, targets: bool) -> Table:
    table = Table(title=f"{item}: {row.name}", title_justify="left")
    for column in ("system", "µs", "to plain"):
        table.add_column(column, justify="left" if column == "system" else "right")
    table.add_column("figures")
    figures = _figures(row, targets)
    for place, (system, time) in enumerate(row.times_us.items()):
        plain = row.times_us.get("plain")
        ratio = f"{time / plain:.2f}x" if plain else ""
        has_them = system == "weft" if "weft" in row.times_us else place == 0
        table.add_row(system, _number(time), ratio, figures if has_them else "")
    return table


def _figures(row: Row, targets: bool) -> str:
    return "\n".join(_figure(figure, targets) for figure in row.figures)


def _figure(figure: Figure, targets: bool) -> str:
    if not targets:
        return f"{figure.what}: {figure.value:.2f} {figure.unit}"
    colour, verdict = ("green", "met") if figure.is_met else ("red", "not met")
    return (
        f"{figure.what}: {figure.value:.2f} {figure.unit}, at most {figure.limit:g} "
        f"[{colour}]{verdict}[/{colour}]"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _write_json(path: Path, items: Mapping[str, list[Row]], num_rounds: int) -> None:
    """Everything that was measured, for comparing runs."""
    content = {
        "torch": torch.__version__, "python": platform.python_version(),
        "machine": platform.machine(), "rounds": num_rounds,
        "items": {
            item: [
                {**asdict(row), "figures": [
                    {**asdict(figure), "met": figure.is_met} for figure in row.figures]}
                for row in rows
            ]
            for item, rows in items.items()
        },
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
