"""How a notebook shows a value: by a picture, or by its text in columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["AsPicture", "AsText", "draw_by", "drawn", "escaped", "preformatted"]

_drawers: list[Callable[[Any], str]] = []


class AsText:
    """A notebook shows the text of `str`, whose columns it keeps."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return preformatted(str(self))


class AsPicture:
    """A notebook shows what `weft.show` draws."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return drawn(self)


def drawn(what: Any) -> str:
    """The drawing as HTML; the text until the drawing package has been imported."""
    return _drawers[-1](what) if _drawers else preformatted(str(what))


def draw_by(draw: Callable[[Any], str]) -> None:
    """Set the function that draws; the drawing package calls this when it is imported."""
    _drawers[:] = [draw]


def preformatted(text: str) -> str:
    return f"<pre>{escaped(text)}</pre>"


def escaped(text: str) -> str:
    """The text between two tags. The standard library's `html` also loads every entity's name."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
