"""A layout as lines of text: blocks to scale as far as a terminal allows, and their meaning.

Lines are made of spans, which are text with or without a colour, so a terminal may show colours
where other outputs show plain text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from textwrap import wrap
from typing import NamedTuple

from weft.core import Layout
from weft.drawing.blocks import Band, Cell, Grid, Limits, grid, shares
from weft.drawing.colours import Colours
from weft.drawing.facts import notes

__all__ = ["Line", "beside", "fitting", "length", "lines", "plain", "sketch"]

Span = tuple[str, str | None]
"""Text, and the colour behind it (`#rrggbb`)."""

Line = list[Span]

_GAP = 3
_SINGLE, _MULTIPLE = (64, 12), (24, 7)
"""Columns and lines inside the borders of a panel, if it is the only one or one of several."""

_FEWER = (16, 12, 9, 7, 5, 4, 3)
"""The numbers of columns of blocks to try, until they fit."""


class _Frame(NamedTuple):
    """A panel in characters: `gutter` to the left of it, then columns, then lines."""

    gutter: int
    widths: tuple[int, ...]
    heights: tuple[int, ...]


def lines(picture: Grid, colours: Colours, head: str, width: int = 80) -> list[Line]:
    """The picture of a layout, from `fitting`, under the line `head`: at most `width` characters
    wide if that line is."""
    frame = _frame(picture, width, _MULTIPLE if len(picture.panels) > 1 else _SINGLE)
    words = notes(picture, _is_prefixed(picture, frame))
    return [[(head, None)], [], *_panels(picture, frame, colours, width), *_notes(words, width)]


def sketch(layout: Layout, width: int = 24, height: int = 7) -> list[Line]:
    """Only the blocks of a layout, about as large as requested, not counting borders."""
    picture = fitting(layout, 2 * width)
    frame = _frame(picture, 2 * width, (width, height))
    return _panels(picture, frame, Colours(picture.ranks), 2 * width)


def fitting(layout: Layout, width: int) -> Grid:
    """The blocks of a layout that fit into `width` characters."""
    for columns in _FEWER:
        picture = grid(layout, Limits(rows=12, columns=columns, panels=16))
        if sum(_need(picture)) <= _room(picture, width) or columns == _FEWER[-1]:
            return picture
    raise AssertionError


def plain(found: Sequence[Line]) -> str:
    """Lines as text without colours."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in found)


def beside(left: Sequence[Line], right: Sequence[Line], gap: int = _GAP) -> list[Line]:
    """Two pictures next to each other."""
    margin = max((length(line) for line in left), default=0) + gap
    out: list[Line] = []
    for number in range(max(len(left), len(right))):
        first = list(left[number]) if number < len(left) else []
        second = list(right[number]) if number < len(right) else []
        out.append([*first, (" " * (margin - length(first)), None), *second] if second else first)
    return out


def _panels(picture: Grid, frame: _Frame, colours: Colours, width: int) -> list[Line]:
    prefixed = _is_prefixed(picture, frame)
    cells = iter(picture.cells)
    drawn: list[list[Line]] = []
    for panel in picture.panels:
        if panel is None:
            drawn.append([[("…", None)]])
        else:
            above: list[Line] = [[(picture.title(panel), None)]] if picture.outer else []
            drawn.append(above + _panel(picture, frame, next(cells), colours, prefixed))
    return _flowed(drawn, width)


def _is_prefixed(picture: Grid, frame: _Frame) -> bool:
    return picture.is_prefixed(lambda text, column: _fits(text, frame.widths[column]))


def _notes(words: Sequence[tuple[str, str]], width: int) -> Iterator[Line]:
    yield []
    margin = 2 + max((len(word) for word, _ in words), default=0)
    for word, meaning in words:
        parts = wrap(
            meaning, max(width - margin, 20), break_long_words=False, break_on_hyphens=False)
        for number, line in enumerate(parts):
            yield [(f"{'' if number else word:{margin}}{line}", None)]


def _need(picture: Grid) -> list[int]:
    """The characters that each column needs."""
    return [int(each) for each in picture.columns_need(lambda text: len(text) + 2, 3)]


def _gutter(picture: Grid) -> int:
    if len(picture.dims) < 2:
        return 0
    return 1 + max(len(str(offset)) for band in picture.rows for offset in (band.start, band.stop))


def _room(picture: Grid, width: int) -> int:
    """The characters inside the borders; the last offset extends beyond the last border."""
    last = len(str(picture.columns[-1].stop)) // 2
    return width - _gutter(picture) - len(picture.columns) - 1 - last


def _frame(picture: Grid, width: int, size: tuple[int, int]) -> _Frame:
    least, gutter = _need(picture), _gutter(picture)
    want, high = size
    need = sum(least)
    num_lines, num_rows = 1, len(picture.rows)
    want = max(min(want, _room(picture, width)), need)
    if len(picture.dims) == 2:
        # A character is about twice as high as it is wide.
        rows, columns = (
            sum([band.scale for band in bands]) for bands in (picture.rows, picture.columns))
        scaled = want * rows / max(columns, 1) / 2
        if scaled > high:
            want = max(min(want, round(2 * high * columns / max(rows, 1))), need)
        num_lines = max(min(round(scaled), high) - (num_rows - 1), num_rows)
        if num_rows == 1:
            num_lines = max(num_lines, min(3, high))
    # Each is rounded separately, so that equal shards are drawn alike.
    widths = map(int, shares([band.scale for band in picture.columns], want, least))
    heights = [round(each) for each in shares(
        [band.scale for band in picture.rows], num_lines, [1] * num_rows)]
    if len(set(heights)) == 1 and num_lines >= 2 * num_rows:
        heights = [height - (height % 2 == 0) for height in heights]  # labels in the middle
    return _Frame(gutter, tuple(widths), tuple(heights))


def _panel(
    picture: Grid, frame: _Frame, cells: Sequence[Sequence[Cell | None]], colours: Colours,
    prefixed: bool,
) -> list[Line]:
    two = len(picture.dims) == 2
    out: list[Line] = []
    if picture.dims:
        out.append([(_offsets(picture.columns, frame), None)])
    rows = picture.rows
    for place, (row, height) in enumerate(zip(rows, frame.heights)):
        corners = "├┼┤" if place else "┌┬┐"
        out.append([(_border(frame, corners, picture.columns, row.start if two else None), None)])
        for line in range(height):
            middle = line == (height - 1) // 2
            out.append(_row(frame, picture.columns, row, cells[place], colours, middle, prefixed))
    out.append([(_border(frame, "└┴┘", picture.columns, rows[-1].stop if two else None), None)])
    return out


def _row(
    frame: _Frame, columns: Sequence[Band], row: Band, cells: Sequence[Cell | None],
    colours: Colours, middle: bool, prefixed: bool,
) -> Line:
    side = "┆" if row.hidden else "│"
    out: Line = [(" " * frame.gutter + side, None)]
    for column, cell, width in zip(columns, cells, frame.widths):
        if cell is None:
            sign = Grid.sign(row, column) if middle else ""
            out.append((sign.center(width), None))
        else:
            texts = cell.texts(prefixed)
            shown = next((text for text in texts if _fits(text, width)), texts[-1])
            out.append(((shown if middle else "").center(width), colours.ground(cell.rank)))
        out.append((side, None))
    return out


def _border(frame: _Frame, corners: str, columns: Sequence[Band], offset: int | None) -> str:
    left, inner, right = corners
    parts = [("┄" if band.hidden else "─") * width for band, width in zip(columns, frame.widths)]
    gutter = f"{'' if offset is None else offset:>{frame.gutter - 1}} " if frame.gutter else ""
    return f"{gutter}{left}{inner.join(parts)}{right}"


def _offsets(columns: Sequence[Band], frame: _Frame) -> str:
    """The offsets above their borders; if two are too close, the later one is omitted."""
    places = [frame.gutter]
    for width in frame.widths:
        places.append(places[-1] + width + 1)
    numbers = [columns[0].start, *(band.stop for band in columns)]
    texts = {place: str(number) for place, number in zip(places, numbers)}
    last = max(places[-1] - len(texts[places[-1]]) // 2, 0)
    out = ""
    for place, following in pairwise([*places, 0]):
        text = texts[place]
        at = max(place - (len(text) - 1) // 2, frame.gutter) if following else last
        if following and at + len(text) >= last and place != places[0]:
            continue
        if len(out) < at or not out:
            out = out.ljust(at) + text
    return out


def _flowed(drawn: Sequence[Sequence[Line]], width: int) -> list[Line]:
    """Panels from left to right, as many in a row as fit."""
    out: list[Line] = []
    row: list[Line] = []
    for panel in drawn:
        joined = beside(row, panel) if row else list(panel)
        if row and max(map(length, joined)) > width:
            out += [*row, []]
            joined = list(panel)
        row = joined
    return out + row


def _fits(text: str, width: int) -> bool:
    return len(text) + 2 <= width


def length(line: Line) -> int:
    """Its characters."""
    return sum(len(text) for text, _ in line)
