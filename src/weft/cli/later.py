"""Commands that are imported when they are called, and where those outside the library are."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import click

from weft.cli.terminal import RefusedError
from weft.errors import message

__all__ = ["Later", "OutsideCommand"]

_INSTALLED = Path(__file__).parents[1] / "tools"
_REPOSITORY = Path(__file__).parents[3]


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
            raise click.ClickException(f"{called} needs {' and '.join(missing)}: "
                                       f"pip install {' '.join(missing)}")
        command = getattr(importlib.import_module(self.place), str(self.name))
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
        self.places = [_INSTALLED, _REPOSITORY / folder]

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None,
                     **extra: Any) -> click.Context:
        place = self._place()
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
        return super().make_context(info_name, args, parent, **extra)

    def _place(self) -> Path:
        for place in self.places:
            if (place / str(self.name) / "command.py").is_file():
                return place
        raise RefusedError(
            message(f"weft {self.name}", f"its program is in none of {len(self.places)} folders",
                    "the demo and the benchmarks are no part of the library: they lie in its "
                    "repository, and pip installs them from there",
                    [place / str(self.name) for place in self.places],
                    "pip install .  # in weft's repository")
        )


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module that is None in sys.modules: its import is disabled
        return False
