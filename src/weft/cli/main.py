"""The commands."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import click

from weft.cli.layouts import plan, show

__all__ = ["main"]

_PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class _Later(click.Command):
    """A command that is imported when it is called: `place` is its module, which has it by name.

    `needs` are the packages that it imports and that the plain install does not bring.
    """

    def __init__(self, name: str, place: str, short_help: str, needs: tuple[str, ...] = ()) -> None:
        super().__init__(name, short_help=short_help)
        self.place = place
        self.needs = needs

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None,
                     **extra: Any) -> click.Context:
        missing = [each for each in self.needs if not _is_there(each)]
        if missing:
            raise click.ClickException(f"weft {self.name} needs {' and '.join(missing)}: "
                                       f"pip install {' '.join(missing)}")
        command = getattr(importlib.import_module(self.place), str(self.name))
        return command.make_context(info_name, args, parent, **extra)


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module that is None in sys.modules: its import is switched off
        return False


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="weft")
def main() -> None:
    """weft: one tensor on many devices."""


main.add_command(_Later("demo", "weft.cli.demo.command", "Train one transformer over four ranks.",
                       ("rich", "matplotlib")))
main.add_command(_Later("bench", "weft.cli.bench.command", "Measure what weft costs, here."))
main.add_command(plan)
main.add_command(show)


@main.command(context_settings=_PASS_ON)
@click.option("-n", "--num-ranks", type=click.IntRange(min=1), required=True,
              help="How many ranks to start on this machine.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(num_ranks: int, script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT as ranks on this machine.

    ARGUMENTS go to the script. The ranks are started by torch's launcher (torchrun does as well)
    with one thread each, unless OMP_NUM_THREADS says otherwise. A rank that dies ends them all,
    with an error: those that end with the same one say it once, with the script's own lines
    (WEFT_DEBUG=1 shows those of weft and torch as well).
    """
    sys.exit(importlib.import_module("weft.cli.ranks").run(num_ranks, [script, *arguments]))
