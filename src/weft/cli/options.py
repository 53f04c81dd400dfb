"""Shared by `weft show` and `weft plan`: reading a layout and writing a drawing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import click

from weft.cli.canvas import write_png
from weft.cli.terminal import RefusedError, check_folder
from weft.core import Layout, Mesh
from weft.core.dtypes import dtype_name
from weft.core.parse import parse_mesh, parse_ranks, parse_shape, parse_sizes, read_layout
from weft.drawing import Drawing

__all__ = ["check_out", "dtype_of", "layout_of", "mesh_of", "mesh_options", "write_out"]

_Options = Callable[[Callable[..., None]], Callable[..., None]]

_MESH: tuple[_Options, ...] = (
    click.option("--mesh", required=True, metavar="AXES", help="Axes and sizes: dp=2,tp=4."),
    click.option("--ranks", metavar="RANKS",
                 help="The ranks of the mesh, row by row: 8-15. All from 0 by default."),
    click.option("--shape", metavar="LENGTHS", help="The global shape: 1024,4096."),
    click.option("--dtype", help="float32, bf16, ..."),
    click.option("--out", type=click.Path(dir_okay=False),
                 help="Write the drawing as well: .svg, .txt, or .png (by matplotlib)."),
)


def mesh_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_MESH):
        command = option(command)
    return command


def mesh_of(
    text: str, ranks: str | None, call: str = "--mesh", ranks_call: str = "--ranks"
) -> Mesh:
    return parse_mesh(text, None if ranks is None else parse_ranks(ranks, ranks_call), call)


def layout_of(
    mesh: Mesh, text: str | None, shape: str | None, sizes: Sequence[str], call: str,
    sizes_call: str = "--sizes",
) -> tuple[Layout, str | None]:
    return read_layout(
        mesh, text, None if shape is None else parse_shape(shape, "--shape"),
        parse_sizes(sizes, sizes_call), call,
    )


def dtype_of(text: str | None, *layouts: Layout) -> str | None:
    if text is None:
        return None
    name = dtype_name(text, "--dtype")
    for layout in layouts:
        layout.check_dtype(name)
    return name


def check_out(out: str | None) -> None:
    stem, suffix = os.path.splitext(out or "")
    if out is not None and suffix not in (".svg", ".png", ".txt"):
        raise RefusedError(
            f"--out {out}", f"{os.path.basename(out)!r} ends in {suffix!r}",
            "a drawing is written as .svg, .png or .txt", [out], f"--out {stem}.svg")
    if out is not None:
        check_folder("--out", out)


def write_out(drawing: Drawing, out: str | None) -> None:
    if out is None:
        return
    if out.endswith(".png"):
        write_png(drawing.scene, out)
    else:
        drawing.write(out)
    click.echo(f"\nWritten to {out}")
