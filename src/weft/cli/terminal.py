"""Output of the commands: drawings, in colour on a terminal, and refusals."""

from __future__ import annotations

import functools
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from weft.drawing import Drawing, Line
from weft.errors import WeftError, message

__all__ = [
    "RefusedError", "ScriptError", "check_folder", "coloured", "explained", "print_drawing",
    "width",
]

_MAX_WIDTH = 160


class RefusedError(click.ClickException):
    """A user's mistake: only its text, or the parts of one, and status 2."""

    exit_code = 2

    def __init__(self, call: str, *parts: Any) -> None:
        super().__init__(message(call, *parts) if parts else call)

    def show(self, file: Any = None) -> None:
        click.echo(self.message, file=file, err=file is None)


class ScriptError(RefusedError):
    """What a script has raised: its traceback, and the status that it would end with."""

    exit_code = 1


def explained(command: Callable[..., None]) -> Callable[..., None]:
    """A command that shows errors of weft as text, without a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except WeftError as error:
            raise RefusedError(str(error)) from error

    return run


def check_folder(option: str, path: str) -> None:
    """Raise if a file cannot be written because its folder is not there: before anything runs."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise RefusedError(
            f"{option} {path}", f"there is no folder {folder!r}",
            "a file is written into a folder that is there", [folder],
            f"mkdir -p {shlex.quote(folder)}")


def width() -> int:
    """Characters per line: COLUMNS, else the terminal's own; 80 if there is neither.

    `shutil` says the same, but loads every kind of archive.
    """
    try:
        columns = int(os.environ.get("COLUMNS") or os.get_terminal_size().columns)
    except (OSError, ValueError):
        columns = 0
    return min(columns, _MAX_WIDTH) if columns > 0 else 80


def print_drawing(drawing: Drawing) -> None:
    """The drawing on standard output, each block in its colour if that is a terminal."""
    console = _console()
    if console is None or not console.is_terminal:
        click.echo(drawing)
    else:
        console.print(coloured(drawing.coloured), highlight=False, soft_wrap=True)


def _console() -> Any:
    """A console of rich, imported only where it is needed; None elsewhere, or if it is missing."""
    forced = os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE")
    if not forced and not sys.stdout.isatty():
        return None
    try:
        return importlib.import_module("rich.console").Console()
    except ImportError:  # the text is the same, without colours
        return None


def coloured(lines: Sequence[Line]) -> Any:
    """Lines of a drawing as a text of rich, which must be installed."""
    rich = importlib.import_module("rich.text")
    out = []
    for line in lines:
        text = rich.Text(end="")
        for part, ground in line:
            text.append(part, f"#000000 on {ground}" if ground else None)
        out.append(text)
    return rich.Text("\n").join(out)
