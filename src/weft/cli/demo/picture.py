"""Where a tensor lives, drawn as text: its blocks, and which ranks hold each.

A layout cuts every dim at the same places everywhere, so its blocks form a grid.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from weft.cli.demo.events import Box

__all__ = ["draw", "holders"]

_COLOURS = ("cyan", "magenta", "yellow", "green")


def holders(boxes: Sequence[Box]) -> dict[Box, list[int]]:
    """Block -> the ranks that hold it, in order of the blocks."""
    ranks: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        ranks.setdefault(box, []).append(rank)
    return dict(sorted(ranks.items()))


def draw(shape: Sequence[int], boxes: Sequence[Box], width: int, height: int) -> Text:
    """A tensor of one or two dims as a box of about `width` x `height` characters.

    Rows go down and columns go right; a tensor of one dim is one row.

    Args:
        shape: the global shape.
        boxes: the block of each rank: ((start, stop), ...).
    """
    if len(shape) == 1:
        shape, boxes, height = (1, *shape), [((0, 1), *box) for box in boxes], 3
    rows = _spans(shape[0], {box[0] for box in boxes}, height - 1, 1)
    columns = _spans(shape[1], {box[1] for box in boxes}, width - 1, 9)
    owners = holders(boxes)
    styles = dict(zip(owners, _COLOURS)) if len(owners) > 1 else dict.fromkeys(owners, "white")
    lines = [_edge("┌┬┐", columns)]
    for place, (row, lines_of_row) in enumerate(rows):
        if place:
            lines.append(_edge("├┼┤", columns))
        for line in range(lines_of_row):
            text = Text("│")
            for column, inner in columns:
                box = (row, column)
                ranks = " ".join(map(str, owners[box]))
                label = f"ranks {ranks}" if len(owners[box]) > 1 else f"rank {ranks}"
                shown = label if len(label) <= inner else ranks
                middle = line == (lines_of_row - 1) // 2
                text.append((shown if middle else "").center(inner), f"bold {styles[box]} reverse")
                text.append("│")
            lines.append(text)
    return Text("\n").join([*lines, _edge("└┴┘", columns)])


def _spans(
    length: int, intervals: set[tuple[int, int]], cells: int, least: int
) -> list[tuple[tuple[int, int], int]]:
    """The intervals in order, each with the number of characters inside its borders."""
    share = cells - len(intervals)
    return [
        ((start, stop), max(least, round(share * (stop - start) / max(length, 1))))
        for start, stop in sorted(intervals)
    ]


def _edge(corners: str, columns: Sequence[tuple[tuple[int, int], int]]) -> Text:
    left, inner, right = corners
    return Text(left + inner.join("─" * width for _, width in columns) + right)
