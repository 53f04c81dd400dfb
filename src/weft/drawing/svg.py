"""A scene as SVG text."""

from __future__ import annotations

from typing import assert_never

from weft.core.display import escaped
from weft.drawing.scene import Label, Mark, Rect, Scene, Stroke

__all__ = ["svg"]

_SANS = "DejaVu Sans, Verdana, Arial, sans-serif"
_MONO = "DejaVu Sans Mono, Menlo, Consolas, monospace"


def svg(scene: Scene) -> str:
    width, height = round(scene.width), round(scene.height)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{_SANS}" role="img">',
        f"<title>{escaped(scene.name)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *map(_element, scene.marks),
        "</svg>", "",
    ])


def _element(mark: Mark) -> str:
    match mark:
        case Rect():
            return (f'<rect x="{mark.x:.1f}" y="{mark.y:.1f}" width="{mark.width:.1f}" '
                    f'height="{mark.height:.1f}" fill="{mark.fill}"/>')
        case Stroke():
            dashes = ' stroke-dasharray="3 3"' if mark.dashed else ""
            return (f'<line x1="{mark.x1:.1f}" y1="{mark.y1:.1f}" x2="{mark.x2:.1f}" '
                    f'y2="{mark.y2:.1f}" stroke="{mark.colour}" '
                    f'stroke-width="{mark.thickness:g}"{dashes}/>')
        case Label():
            style = ' font-weight="bold"' if mark.bold else ""
            style += f' font-family="{_MONO}"' if mark.mono else ""
            style += f' text-anchor="{mark.anchor}"' if mark.anchor != "start" else ""
            # A baseline 0.35 em below the middle centres capitals and digits in every viewer.
            x, y, down = mark.x, mark.y, 0.35 * mark.size
            if mark.turned:
                place = f'transform="translate({x + down:.1f} {y:.1f}) rotate(-90)"'
            else:
                place = f'x="{x:.1f}" y="{y + down:.1f}"'
            return (f'<text {place} font-size="{mark.size:g}" fill="{mark.colour}"{style}>'
                    f"{escaped(mark.text)}</text>")
        case _:
            assert_never(mark)
