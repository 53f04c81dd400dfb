"""The public call: `show` draws whatever has a layout, as text and as SVG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

from weft.core import Layout, as_mesh
from weft.core.display import draw_by, preformatted
from weft.core.names import also_called
from weft.drawing.colours import Colours
from weft.drawing.facts import named, title
from weft.drawing.figure import drawable, figure, joined
from weft.drawing.scene import Scene
from weft.drawing.svg import svg
from weft.drawing.text import Line, beside, fitting, length, lines, plain
from weft.errors import LayoutError, ShardTypeError

if TYPE_CHECKING:  # to draw a layout takes no planner
    from weft.planner import Plan

__all__ = ["Drawing", "show"]

_HALF = 46
"""Characters of a line up to which the words below a picture seldom need a second line."""


class Drawing(str):
    """The text of a drawing, as lines; a notebook shows its SVG instead.

    `coloured` are the same lines as spans of text and colour, `scene` is the drawing to scale.
    """

    coloured: Sequence[Line]
    _parts: tuple[Layout | Plan, str | None]

    def __new__(
        cls, coloured: Sequence[Line], drawn: Layout | Plan, dtype: str | None
    ) -> Drawing:
        self = super().__new__(cls, plain(coloured))
        self.coloured, self._parts = coloured, (drawn, dtype)
        return self

    @cached_property
    def scene(self) -> Scene:
        """The drawing as marks in pixels, for matplotlib and the like."""
        return _scene(*self._parts)

    def svg(self) -> str:
        """The drawing as an SVG document."""
        return svg(self.scene)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the drawing to a file.

        Args:
            path: a name that ends in `.svg` or `.txt`.

        Raises:
            LayoutError: another kind of file.
        """
        path = os.fspath(path)
        stem, suffix = os.path.splitext(path)
        if suffix not in (".svg", ".txt"):
            raise LayoutError(
                "show(out=)", f"{path!r} ends in {suffix!r}",
                "show writes .svg and .txt; a .png is drawn by matplotlib, on the "
                "command line", [path],
                f"out={stem + '.svg'!r}; or weft show ... --out {stem}.png")
        text = self.svg() if suffix == ".svg" else f"{self}\n"
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def __repr__(self) -> str:
        return str(self)

    def _repr_svg_(self) -> str:
        return self.svg()


@also_called(path="out", filename="out")
def show(
    what: Any, out: str | os.PathLike[str] | None = None, *, width: int = 80,
    dtype: str | None = None,
) -> Drawing:
    """Draw the layout of a tensor: its blocks to scale, and the ranks that hold each.

    Needs no processes and never communicates. The size of a drawing does not grow with the mesh.
    The result is text: print it, or let a notebook show it.

    Args:
        what: a layout, a ShardTensor, a torch DTensor, or a plan, which shows both of its sides.
        out: a file to write as well, `.svg` or `.txt`.
        width: the maximum number of characters per line.
        dtype: for a layout, the dtype shown in the title.

    Returns:
        The drawing, a str with `svg()`, `scene` and `write(path)`.

    Raises:
        ShardTypeError: `what` has no layout.
        LayoutError: `out` is another kind of file.

    >>> from weft.core import Mesh, P
    >>> print(show(Layout(Mesh({"tp": 3}), (8,), P("tp")), width=60))
    [8@tp] on Mesh(tp=3): 3 ranks
    <BLANKLINE>
    0                     3                     6              8
    ┌─────────────────────┬─────────────────────┬──────────────┐
    │        rank 0       │        rank 1       │    rank 2    │
    └─────────────────────┴─────────────────────┴──────────────┘
    <BLANKLINE>
    columns  dim 0: 8 over tp, 3 shards of 3, 3, 2
    """
    drawn, own = _drawn(what)
    drawing = Drawing(_lines(drawn, dtype or own, width), drawn, dtype or own)
    if out is not None:
        drawing.write(out)
    return drawing


def _picture(what: Any) -> str:
    """What a notebook shows of something that `show` draws, as HTML."""
    said = preformatted(str(what)) if _is_plan(what) else ""
    return f"{said}{show(what).svg()}"


draw_by(_picture)


def _drawn(what: Any) -> tuple[Layout | Plan, str | None]:
    if isinstance(what, Layout) or _is_plan(what):
        return what, None
    layout = getattr(what, "sharding", None)
    if isinstance(layout, Layout):
        return layout, str(what.dtype)
    if all(hasattr(what, name) for name in ("device_mesh", "placements", "shape", "dtype")):
        mesh = as_mesh(what.device_mesh, "show(dtensor)")
        return Layout(mesh, tuple(what.shape), what.placements), str(what.dtype)
    raise ShardTypeError(
        "show(what)", f"an object of type {type(what).__name__} has no layout",
        "a layout, a ShardTensor, a torch DTensor or a plan can be drawn",
        [type(what).__name__], "weft.show(weft.distribute_tensor(x, mesh, P('dp')))")


def _is_plan(what: Any) -> TypeGuard[Plan]:
    return all(isinstance(getattr(what, side, None), Layout) for side in ("src", "dst"))


def _lines(drawn: Layout | Plan, dtype: str | None, width: int) -> list[Line]:
    if isinstance(drawn, Layout):
        picture = fitting(drawn, width)
        return lines(picture, Colours(picture.ranks), named(drawn, dtype), width)
    above: list[Line] = [[(line, None)] for line in [*str(drawn).splitlines(), ""]]
    gap = 4
    half = (width - gap) // 2
    if half >= _HALF:
        left, right = _sides(drawn, half)
        if all(length(line) <= half for line in (*left, *right)):
            return above + beside(left, right, half + gap - max(map(length, left)))
    left, right = _sides(drawn, width)
    return [*above, *left, [], *right]


def _sides(drawn: Plan, width: int) -> tuple[list[Line], list[Line]]:
    src, dst = fitting(drawn.src, width), fitting(drawn.dst, width)
    colours = Colours(src.ranks | dst.ranks)
    say = title if drawn.src.mesh == drawn.dst.mesh else named
    return (lines(src, colours, f"from {say(drawn.src)}", width),
            lines(dst, colours, f"to {say(drawn.dst)}", width))


def _scene(drawn: Layout | Plan, dtype: str | None) -> Scene:
    if isinstance(drawn, Layout):
        picture = drawable(drawn)
        return figure(picture, Colours(picture.ranks), dtype)
    src, dst = drawable(drawn.src), drawable(drawn.dst)
    colours = Colours(src.ranks | dst.ranks)
    first, *rest = str(drawn).splitlines()
    below = [line.strip() for line in rest]
    return joined(figure(src, colours), figure(dst, colours), first, below)
