"""What the commands print: drawings, in colour where there is a terminal, and refusals."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import click

from weft.errors import WeftError
from weft.show import Drawing, Line

try:
    from rich.console import Console
    from rich.text import Text
except ImportError:  # without it the text is the same, without colours
    Console = Text = None

__all__ = ["RefusedError", "coloured", "explained", "print_drawing", "width"]

_MAX_WIDTH = 160


class RefusedError(click.ClickException):
    """A user's mistake: its text and nothing else, and status 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(self.message, file=file, err=file is None)


def explained(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose users see errors of weft as text, without a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except WeftError as error:
            raise RefusedError(str(error)) from error

    return run


def width() -> int:
    """Characters of a line of the terminal; 80 where there is none."""
    return min(shutil.get_terminal_size((80, 24)).columns, _MAX_WIDTH)


def print_drawing(drawing: Drawing) -> None:
    """The drawing on standard output, each block in its colour if that is a terminal."""
    if Console is None or Text is None or not Console().is_terminal:
        click.echo(drawing)
        return
    Console().print(coloured(drawing.coloured), highlight=False, soft_wrap=True)


def coloured(lines: Sequence[Line]) -> Any:
    """Lines of a drawing as a text of rich, which must be installed."""
    assert Text is not None
    out = []
    for line in lines:
        text = Text(end="")
        for part, ground in line:
            text.append(part, f"#000000 on {ground}" if ground else None)
        out.append(text)
    return Text("\n").join(out)
