"""Pictures as pixels: matplotlib is imported only when one is drawn."""

from __future__ import annotations

import importlib
import os
from typing import Any, assert_never

from weft.cli.terminal import RefusedError
from weft.drawing import Label, Rect, Scene, Stroke

__all__ = ["new_figure", "write_png"]

_DPI = 100
_POINTS = 72 / _DPI
"""Points of one pixel of a scene."""


def new_figure(
    width: float, height: float, path: str | os.PathLike[str], **options: Any
) -> Any:
    """An empty matplotlib figure of that many inches, to be written to `path`."""
    try:
        figures = importlib.import_module("matplotlib.figure")
        backend = importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        stem, suffix = os.path.splitext(path)
        raise RefusedError(
            f"--out {path}", f"{suffix} files are drawn by matplotlib, which cannot be imported "
            f"({error})", "weft itself needs no matplotlib; the commands that draw pixels do",
            [str(path)], f"pip install matplotlib; or --out {stem}.svg, which weft writes by "
            "itself where a command offers it") from error
    figure = figures.Figure(figsize=(width, height), **options)
    backend.FigureCanvasAgg(figure)
    return figure


def write_png(scene: Scene, path: str) -> None:
    """Write a scene as PNG, with two dots per pixel of the scene."""
    figure = new_figure(scene.width / _DPI, scene.height / _DPI, path)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.set_axis_off()
    patches = importlib.import_module("matplotlib.patches")
    for number, mark in enumerate(scene.marks):
        match mark:
            case Rect():
                axes.add_patch(patches.Rectangle(
                    (mark.x, mark.y), mark.width, mark.height, facecolor=mark.fill,
                    edgecolor="none", zorder=number))
            case Stroke():
                # matplotlib counts dashes in thicknesses of the line.
                dash = 3 / mark.thickness
                dashes = {"linestyle": (0, (dash, dash)), "dash_capstyle": "butt"}
                axes.plot((mark.x1, mark.x2), (mark.y1, mark.y2), color=mark.colour,
                          linewidth=mark.thickness * _POINTS, zorder=number,
                          solid_capstyle="butt", **(dashes if mark.dashed else {}))
            case Label():
                _write(axes, mark, number)
            case _:
                assert_never(mark)
    figure.savefig(path, dpi=2 * _DPI)


def _write(axes: Any, label: Label, number: int) -> None:
    # As in the SVG: the baseline is 0.35 em below the middle.
    down = 0.35 * label.size
    x, y = (label.x + down, label.y) if label.turned else (label.x, label.y + down)
    axes.text(
        x, y, label.text.replace("$", r"\$"), fontsize=label.size * _POINTS, color=label.colour,
        ha={"start": "left", "middle": "center", "end": "right"}[label.anchor], va="baseline",
        family="DejaVu Sans Mono" if label.mono else "DejaVu Sans",
        weight="bold" if label.bold else "normal", rotation=90 if label.turned else 0,
        rotation_mode="anchor", zorder=number,
    )
