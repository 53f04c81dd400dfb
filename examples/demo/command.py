"""`weft demo`: one model in one process, then over four ranks, and whether they agree."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
import torch
from rich.console import Console

from demo import screen
from demo.follow import RanksFailed, Told, follow
from demo.plot import plot_losses
from demo.text import Corpus, standard_library
from demo.train import TOLERANCE, Run, Step, differences, plain

__all__ = ["demo"]

_MAX_WIDTH = 100


@click.command()
@click.option("--steps", default=100, show_default=True, type=click.IntRange(min=2),
              help="Steps to train.")
@click.option("--compare/--no-compare", default=True, show_default=True,
              help="Train in a single process too, and compare every loss.")
@click.option("--out", default="out", show_default=True, help="Folder for the loss plot.",
              type=click.Path(path_type=Path, file_okay=False))
def demo(steps: int, compare: bool, out: Path) -> None:
    """Train one transformer over four ranks.

    The same is trained in a single process, and the losses of all steps are compared. Ends with
    status 1 when a loss differs by more than 1e-4 of itself, or when a rank dies.
    """
    start = time.perf_counter()
    console = Console()
    console.width = min(console.width, _MAX_WIDTH)
    torch.set_num_threads(1)  # as each rank
    run = Run(num_steps=steps)
    with console.status("reading Python's standard library"):
        corpus = standard_library()
    console.print(screen.header(run, corpus))
    console.print(screen.written_shardings(run))
    single = _in_one_process(console, run, corpus) if compare else []
    try:
        told = _over_ranks(console, run, single)
    except RanksFailed as failed:
        console.print(str(failed), markup=False, highlight=False, soft_wrap=True)
        console.print("[bold red]failed[/]: the ranks ended before the last step")
        sys.exit(1)
    console.print(screen.losses(told.steps, single))
    console.print(screen.traffic(told.traffic))
    plot = out / "demo-loss.png"
    plot_losses(plot, run, told.steps, single)
    console.print(screen.summary(run, told, single, time.perf_counter() - start))
    console.print(f"The losses as a picture: {plot}", highlight=False, soft_wrap=True)
    agree = max(differences(told.steps, single), default=0.0) <= TOLERANCE
    sys.exit(0 if agree else 1)


def _in_one_process(console: Console, run: Run, corpus: Corpus) -> list[Step]:
    made: list[Step] = []
    with screen.bar(console, "one process", run) as advance:
        for step in plain(run, corpus)[1]:
            made.append(step)
            advance(made)
    return made


def _over_ranks(console: Console, run: Run, single: list[Step]) -> Told:
    told = Told()
    with console.status("starting four ranks"):
        events = follow(run, told)
        while not told.steps and next(events, None):
            pass
    console.print(screen.parameters(told.parameters))
    console.print(screen.pictures(told.parameters))
    with screen.bar(console, "four ranks", run, single) as advance:
        advance(told.steps)
        for _ in events:
            advance(told.steps)
    return told
