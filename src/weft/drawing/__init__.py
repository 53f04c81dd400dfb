"""Text and pictures of layouts and plans. Standard library only."""

from weft.drawing.drawing import Drawing, show
from weft.drawing.scene import Label, Mark, Rect, Scene, Stroke
from weft.drawing.text import Line, sketch

__all__ = [
    "Drawing", "Label", "Line", "Mark", "Rect", "Scene", "Stroke", "show", "sketch",
]
