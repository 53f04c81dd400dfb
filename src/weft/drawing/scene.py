"""A drawing as a list of marks in pixels, for its back ends (`svg`, matplotlib).

Marks are rectangles, lines and one-line texts, so every back end takes a few lines and all
of them give the same picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "Anchor", "Label", "Mark", "Rect", "Scene", "Stroke", "bounds", "hatch", "moved", "text_width",
]

Anchor = str
"""Which point of a text is at its coordinates: "start", "middle" or "end"."""


class Rect(NamedTuple):
    """A rectangle, filled with a colour, `#rrggbb`."""

    x: float
    y: float
    width: float
    height: float
    fill: str


class Stroke(NamedTuple):
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    thickness: float = 1.0
    dashed: bool = False


class Label(NamedTuple):
    """One line of text, vertically centred on `y`; turned labels read upwards."""

    x: float
    y: float
    text: str
    size: float = 12.0
    colour: str = "#222222"
    anchor: Anchor = "middle"
    bold: bool = False
    mono: bool = False
    turned: bool = False


Mark = Rect | Stroke | Label


class Scene(NamedTuple):
    """Marks on a white ground of `width` x `height` pixels; y goes down."""

    width: float
    height: float
    marks: tuple[Mark, ...]
    name: str

    def moved(self, x: float, y: float) -> Iterator[Mark]:
        return (moved(mark, x, y) for mark in self.marks)


def moved(mark: Mark, x: float, y: float) -> Mark:
    if isinstance(mark, Stroke):
        return mark._replace(x1=mark.x1 + x, x2=mark.x2 + x, y1=mark.y1 + y, y2=mark.y2 + y)
    return mark._replace(x=mark.x + x, y=mark.y + y)


def hatch(box: Rect, colour: str) -> Iterator[Stroke]:
    """Diagonal strokes over a rectangle, ending at its borders."""
    gap = 9.0
    for number in range(1, math.ceil((box.width + box.height) / gap)):
        # The stroke where (x offset) + (y offset) = at.
        at = gap * number
        x1, x2 = max(0.0, at - box.height), min(at, box.width)
        yield Stroke(box.x + x1, box.y + at - x1, box.x + x2, box.y + at - x2, colour, 0.8)


_NARROW = set(" ,.:;()[]{}|!'-ijlt1f")


def text_width(text: str, size: float, mono: bool = False) -> float:
    """The approximate width of a text in pixels, in the fonts that back ends request."""
    if mono:
        return 0.61 * size * len(text)
    return size * sum(0.4 if char in _NARROW and char != "1" else 0.64 for char in text)


def bounds(marks: Sequence[Mark]) -> tuple[float, float]:
    """How far marks reach to the right and down."""
    right, down = 0.0, 0.0
    for mark in marks:
        match mark:
            case Rect():
                right, down = max(right, mark.x + mark.width), max(down, mark.y + mark.height)
            case Stroke():
                right, down = max(right, mark.x1, mark.x2), max(down, mark.y1, mark.y2)
            case Label():
                width = text_width(mark.text, mark.size, mark.mono)
                part = {"start": 1.0, "middle": 0.5, "end": 0.0}[mark.anchor]
                right = max(right, mark.x + (0.0 if mark.turned else part * width))
                down = max(down, mark.y + mark.size)
    return right, down
