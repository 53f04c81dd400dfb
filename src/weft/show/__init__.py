"""Text and pictures of layouts and plans. Standard library only."""

from weft.show.drawing import Drawing, show
from weft.show.one_rank import rank_lines
from weft.show.scene import Label, Mark, Rect, Scene, Stroke
from weft.show.text import Line, sketch

__all__ = [
    "Drawing", "Label", "Line", "Mark", "Rect", "Scene", "Stroke", "rank_lines", "show", "sketch",
]
