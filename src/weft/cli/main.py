"""The commands."""

from __future__ import annotations

import importlib
import sys

import click

from weft._version import __version__
from weft.cli.later import Later, OutsideCommand, collect_garbage

__all__ = ["main"]

_PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """weft: one tensor on many devices."""


main.add_command(OutsideCommand("examples", "demo", "Train one transformer over four ranks.",
                                ("rich", "matplotlib")))
main.add_command(OutsideCommand("", "bench", "Measure what weft costs on this machine."))
main.add_command(Later("doctor", "weft.cli.doctor",
                       "Say what is installed, and whether ranks run."))
main.add_command(Later("plan", "weft.cli.plan", "Plan the way from one layout to another."))
main.add_command(Later("show", "weft.cli.show",
                       "Draw a layout: its blocks, and the ranks that hold them."))
main.add_command(Later("dry", "weft.cli.dry",
                       "Say what a script costs on any number of ranks, without them."))
main.add_command(Later("trace", "weft.cli.trace",
                       "Run a script as ranks, and write when collectives and modules ran."))


@main.command(context_settings=_PASS_ON)
@click.option("-n", "--num-ranks", type=click.IntRange(min=1), required=True,
              help="How many ranks to start on this machine.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(num_ranks: int, script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT as ranks on this machine.

    ARGUMENTS go to the script. torch's launcher starts the ranks (torchrun works as well), with
    one thread each, unless OMP_NUM_THREADS says otherwise. If a rank dies, all end with an error.
    Ranks with the same error print it once, with the script's own lines (WEFT_DEBUG=1 shows those
    of weft and torch as well).
    """
    ranks = importlib.import_module("weft.cli.ranks")
    collect_garbage()
    sys.exit(ranks.run(num_ranks, [script, *arguments]))
