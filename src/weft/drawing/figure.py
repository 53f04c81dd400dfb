"""A layout as a drawing: blocks to scale, offsets on their borders, one colour per block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from weft.core import Layout
from weft.drawing.blocks import Band, Cell, Grid, Limits, grid, shares
from weft.drawing.colours import Colours
from weft.drawing.facts import axes_text, mesh_text, named, notes, title
from weft.drawing.scene import Label, Mark, Rect, Scene, Stroke, bounds, hatch, moved, text_width

__all__ = ["drawable", "figure", "joined"]

_MARGIN = 22.0
_INK, _GREY, _PALE = "#222222", "#666666", "#f4f4f4"
_SINGLE, _MULTIPLE = (600.0, 330.0), (230.0, 150.0)
"""Width and height of a panel, if it is the only one or one of several."""
_ROW = 26.0
_GAP = 34.0
_WIDTH, _WIDE = 940.0, 1500.0
"""The width of a page, for one drawing and for two side by side."""


class _Frame(NamedTuple):
    """The borders of a panel's columns and rows, from its upper left corner."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]


def drawable(layout: Layout) -> Grid:
    """The blocks of a layout that a figure shows; their number does not grow with the mesh."""
    return grid(layout, Limits(rows=12, columns=12, panels=16))


def figure(picture: Grid, colours: Colours, dtype: str | None = None) -> Scene:
    """The drawing of a layout, of `drawable`; `dtype` is named in the title."""
    layout, frame = picture.layout, _frame(picture)
    head = title(layout, dtype)
    marks: list[Mark] = [
        Label(_MARGIN, _MARGIN + 8, head, 16, _INK, "start", bold=True, mono=True),
        Label(_MARGIN, _MARGIN + 31, mesh_text(layout.mesh), 12, _GREY, "start"),
    ]
    room = [right - left for left, right in pairwise(frame.xs)]
    prefixed = picture.is_prefixed(lambda text, column: _fits(text, room[column]))
    marks += _panels(picture, frame, colours, prefixed, _MARGIN + 56)
    down = bounds(marks)[1] + 22
    for word, meaning in notes(picture, prefixed):
        marks.append(Label(_MARGIN, down, word, 12, _GREY, "start", bold=True))
        marks.append(Label(_MARGIN + 74, down, meaning, 12, _GREY, "start"))
        down += 19
    right, down = bounds(marks)
    return Scene(right + _MARGIN, down + _MARGIN - 8, tuple(marks), named(layout, dtype))


def joined(left: Scene, right: Scene, name: str, below: Sequence[str] = ()) -> Scene:
    """Two drawings with an arrow between them, side by side where a page is wide enough.

    `below` are lines of text under them.
    """
    arrow = 30.0
    marks: list[Mark]
    if left.width + right.width + arrow <= _WIDE:
        marks = [*left.marks, *right.moved(left.width + arrow, 0),
                 *_arrow(left.width - 6, 170, arrow)]
        width, height = left.width + arrow + right.width, max(left.height, right.height)
    else:
        marks = [*left.marks, *right.moved(0, left.height + 6),
                 Stroke(_MARGIN, left.height, max(left.width, right.width) - _MARGIN, left.height,
                        _GREY, 0.8)]
        width, height = max(left.width, right.width), left.height + right.height + 6
    for line in below:
        marks.append(Label(_MARGIN, height + 6, line, 12, _INK, "start", mono=True))
        height += 19
    return Scene(max(width, bounds(marks)[0] + _MARGIN), height + _MARGIN / 2, tuple(marks), name)


def _arrow(x: float, y: float, length: float) -> Iterator[Stroke]:
    yield Stroke(x, y, x + length, y, _INK, 2)
    yield Stroke(x + length - 8, y - 6, x + length, y, _INK, 2)
    yield Stroke(x + length - 8, y + 6, x + length, y, _INK, 2)


def _frame(picture: Grid) -> _Frame:
    width, high = _MULTIPLE if len(picture.panels) > 1 else _SINGLE
    least = picture.columns_need(lambda text: text_width(text, 12) + 12, 30.0)
    tall = 50.0
    if len(picture.dims) == 2:
        rows, columns = (
            sum([band.scale for band in found]) for found in (picture.rows, picture.columns))
        scaled = width * rows / max(columns, 1)
        if scaled > high:
            width = max(high * columns / max(rows, 1), 160.0)
        tall = max(min(scaled, high), 60.0)
    widths = shares([band.scale for band in picture.columns], width, least)
    heights = shares([band.scale for band in picture.rows], tall, [_ROW] * len(picture.rows))
    return _Frame(*[tuple(accumulate(each, initial=0.0)) for each in (widths, heights)])


def _panels(
    picture: Grid, frame: _Frame, colours: Colours, prefixed: bool, top: float
) -> Iterator[Mark]:
    """All panels from left to right, as many in a row as a page has room for."""
    two = len(picture.dims) == 2
    offsets = [str(band.stop) for band in picture.rows] if two else [""]
    left = _MARGIN + (26 + max(text_width(text, 11) for text in offsets) if two else 0)
    above = (38 if picture.dims else 0) + (22 if picture.outer else 0)
    x, y = left, top + above
    cells = iter(picture.cells)
    for place, panel in enumerate(picture.panels):
        if panel is None:
            yield Label(x - left + _MARGIN + 10, y + frame.ys[-1] / 2, "…", 20, _GREY)
            x += 40
        else:
            if picture.outer:
                yield Label(x, y - above + 6, picture.title(panel), 12, _INK, "start", mono=True)
            for mark in _panel(picture, frame, next(cells), panel, colours, prefixed):
                yield moved(mark, x, y)
            x += frame.xs[-1] + left - _MARGIN + _GAP
        more = picture.panels[place + 1 : place + 2]
        if more and more[0] is not None and x + frame.xs[-1] > _WIDTH:
            x, y = left, y + frame.ys[-1] + above + 18


def _panel(
    picture: Grid, frame: _Frame, cells: Sequence[Sequence[Cell | None]],
    panel: Sequence[Band], colours: Colours, prefixed: bool,
) -> Iterator[Mark]:
    """A panel whose upper left corner is the origin."""
    for row, (up, down), in_row in zip(picture.rows, pairwise(frame.ys), cells):
        for column, (left, right), cell in zip(picture.columns, pairwise(frame.xs), in_row):
            if cell is None:
                sign = picture.sign(row, column)
                yield Label((left + right) / 2, (up + down) / 2, sign, 14, _GREY)
                continue
            texts = cell.texts(prefixed)
            text = next((text for text in texts if _fits(text, right - left)), texts[-1])
            lengths = " x ".join(map(str, picture.block_shape(panel, row, column)))
            box = Rect(left, up, right - left, down - up, colours.ground(cell.rank))
            if cell.is_empty:
                yield from _block(box._replace(fill=_PALE), text, "", None)
            else:
                shade = colours.shade(cell.rank) if cell.kind else None
                yield from _block(box, text, lengths, shade)
    yield from _lines(picture, frame)
    yield from _axes(picture, frame)


def _block(box: Rect, text: str, lengths: str, shade: str | None) -> Iterator[Mark]:
    """A block with its ranks, its lengths if there is room, hatched if it is a partial value."""
    middle, x = box.y + box.height / 2, box.x + box.width / 2
    if box.height < 44 or text_width(lengths, 10) + 10 > box.width:
        lengths = ""
    yield box
    if shade:
        yield from hatch(box, shade)
        across = max(text_width(text, 12), text_width(lengths, 10)) + 8
        high = 36 if lengths else 18
        yield Rect(x - across / 2, middle - high / 2, across, high, box.fill)
    yield Label(x, middle - (8 if lengths else 0), text, 12, _INK)
    if lengths:
        yield Label(x, middle + 9, lengths, 10, _GREY)


def _fits(text: str, width: float) -> bool:
    return text_width(text, 12) + 10 <= width


def _lines(picture: Grid, frame: _Frame) -> Iterator[Stroke]:
    right, down = frame.xs[-1], frame.ys[-1]
    for place, at in enumerate(frame.xs):
        inner = 0 < place < len(frame.xs) - 1
        yield Stroke(at, 0, at, down, _INK, 1.0 if inner else 1.6)
    for place, at in enumerate(frame.ys):
        inner = 0 < place < len(frame.ys) - 1
        yield Stroke(0, at, right, at, _INK, 1.0 if inner else 1.6)
    # The lines break where something is hidden.
    for place, band in enumerate(picture.columns):
        if band.hidden:
            for at in frame.ys:
                yield Stroke(frame.xs[place] + 2, at, frame.xs[place + 1] - 2, at,
                             "#ffffff", 2.6, dashed=True)
    for place, band in enumerate(picture.rows):
        if band.hidden:
            for at in frame.xs:
                yield Stroke(at, frame.ys[place] + 2, at, frame.ys[place + 1] - 2,
                             "#ffffff", 2.6, dashed=True)


def _axes(picture: Grid, frame: _Frame) -> Iterator[Mark]:
    """Offsets at the borders, and the dim and the mesh axes that shard it."""
    layout = picture.layout
    if picture.dims:
        free = -1e9
        numbers = [picture.columns[0].start, *(band.stop for band in picture.columns)]
        last = frame.xs[-1] - text_width(str(numbers[-1]), 11) / 2
        for place, (at, number) in enumerate(zip(frame.xs, numbers)):
            half = text_width(str(number), 11) / 2
            is_last = place == len(numbers) - 1
            if is_last or (at - half > free + 4 and (at + half < last - 4)):
                yield Label(at, -11, str(number), 11, _GREY)
                free = at + half
        yield Label(frame.xs[-1] / 2, -29, axes_text(layout, picture.dims[-1]), 12, _INK)
    if len(picture.dims) == 2:
        numbers = [picture.rows[0].start, *(band.stop for band in picture.rows)]
        for at, number in zip(frame.ys, numbers):
            yield Label(-7, at, str(number), 11, _GREY, "end")
        wide = max(text_width(str(number), 11) for number in numbers)
        yield Label(-18 - wide, frame.ys[-1] / 2, axes_text(layout, picture.dims[0]), 12,
                    _INK, turned=True)
