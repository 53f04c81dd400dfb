"""Commands that are imported when they are called, and where those outside the library are."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
from typing import Any

import click

from weft.cli.terminal import RefusedError

__all__ = ["Later", "OutsideCommand", "collect_garbage"]

_WEFT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = os.path.join(_WEFT, "tools")
_REPOSITORY = os.path.dirname(os.path.dirname(_WEFT))


class Later(click.Command):
    """A command that is imported when it is called: `place` is the module that has it by name.

    `needs` are the packages that it imports and that a plain install does not include.
    """

    def __init__(self, name: str, place: str, short_help: str, needs: tuple[str, ...] = ()) -> None:
        super().__init__(name, short_help=short_help)
        self.place = place
        self.needs = needs

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None,
                     **extra: Any) -> click.Context:
        missing = [each for each in self.needs if not _is_there(each)]
        if missing and extra.get("resilient_parsing"):  # a shell completes: it is told nothing
            return click.Command(self.name).make_context(info_name, args, parent, **extra)
        if missing:
            called = " ".join([*([parent.command_path] if parent else []), str(self.name)])
            needs = f"{called} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
            if "--help" in args:  # of its options only the command itself knows
                told = click.Command(self.name, help=f"{self.short_help}\n\n{needs}")
                return told.make_context(info_name, ["--help"], parent, **extra)
            raise click.ClickException(needs)
        command = getattr(importlib.import_module(self.place), str(self.name))
        collect_garbage()
        return command.make_context(info_name, args, parent, **extra)


class OutsideCommand(Later):
    """A command whose package, of the same name, is not part of the library.

    An installation has the package in `weft/tools`; in the repository it is in `folder`.

    Raises:
        RefusedError: it is in neither.
    """

    def __init__(self, folder: str, name: str, short_help: str,
                 needs: tuple[str, ...] = ()) -> None:
        super().__init__(name, f"{name}.command", short_help, needs)
        self.places = [_INSTALLED, os.path.normpath(os.path.join(_REPOSITORY, folder))]

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None,
                     **extra: Any) -> click.Context:
        place = self._place()
        if place not in sys.path:
            sys.path.insert(0, place)
        return super().make_context(info_name, args, parent, **extra)

    def _place(self) -> str:
        for place in self.places:
            if os.path.isfile(os.path.join(place, str(self.name), "command.py")):
                return place
        raise RefusedError(
            f"weft {self.name}", f"its program is in none of {len(self.places)} folders",
            "the demo and the benchmarks are no part of the library: they lie in its repository, "
            "and pip installs them from there",
            [os.path.join(place, str(self.name)) for place in self.places],
            "pip install .  # in weft's repository")


def collect_garbage() -> None:
    """Python collects again, if `weft.__main__` has stopped it: but of what has been imported
    nothing is garbage, and to look at it takes a tenth of a start."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module that is None in sys.modules: its import is disabled
        return False
