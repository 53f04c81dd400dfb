"""`weft show` and `weft plan`: layouts and plans drawn, without any processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from weft.cli.canvas import write_png
from weft.cli.terminal import RefusedError, explained, print_drawing, width
from weft.core import Layout, Mesh
from weft.core.dtypes import dtype_name
from weft.core.parse import parse_mesh, parse_ranks, parse_shape, parse_sizes, read_layout
from weft.drawing import Drawing, rank_lines
from weft.drawing import show as draw
from weft.errors import message
from weft.planner import plan as make_plan

__all__ = ["plan", "show"]

_Options = Callable[[Callable[..., None]], Callable[..., None]]

_MESH: tuple[_Options, ...] = (
    click.option("--mesh", required=True, metavar="AXES", help="Axes and sizes: dp=2,tp=4."),
    click.option("--ranks", metavar="RANKS",
                 help="The ranks of the mesh, row by row: 8-15. All from 0 by default."),
    click.option("--shape", metavar="LENGTHS", help="The global shape: 1024,4096."),
    click.option("--dtype", help="float32, bf16, ..."),
    click.option("--out", type=click.Path(path_type=Path, dir_okay=False),
                 help="Write the drawing as well: .svg, .txt, or .png (by matplotlib)."),
)


def _mesh_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_MESH):
        command = option(command)
    return command


@click.command()
@click.argument("layout", required=False)
@_mesh_options
@click.option("--spec", help="P(dp,tp), placements '[Shard(0), Replicate()]', or an op-sharding "
                             "'{devices=[2,4]<=[8]}'. Replicated by default.")
@click.option("--sizes", multiple=True, metavar="DIM=SIZES",
              help="Shard sizes of a dim: 0=6,3,4,7, or 0=balanced. May be repeated.")
@explained
def show(
    layout: str | None, mesh: str, ranks: str | None, shape: str | None, dtype: str | None,
    out: Path | None, spec: str | None, sizes: Sequence[str],
) -> None:
    """Draw a layout: its blocks, and the ranks that hold them.

    LAYOUT is a layout's own text, as weft prints it, in place of --shape, --spec and --sizes.

    \b
    weft show --mesh dp=2,tp=4 --shape 1024,4096 --spec 'P(dp,tp)'
    weft show --mesh dp=2,tp=4 '[20@dp{6,14}, 64] partial(sum@tp)'
    """
    if layout is not None and spec is not None:
        raise click.UsageError(f"LAYOUT {layout!r} and --spec {spec!r} both say the layout")
    drawn, own = _layout(_mesh(mesh, ranks), spec if layout is None else layout, shape, sizes,
                         "--spec" if layout is None else "LAYOUT")
    name = _dtype(dtype or own, drawn)
    _check(out)
    drawing = draw(drawn, width=width(), dtype=name)
    print_drawing(drawing)
    _write(drawing, out)


@click.command()
@_mesh_options
@click.option("--from", "src", required=True, metavar="SPEC",
              help="The layout before: a spec, placements, or a layout's own text.")
@click.option("--to", "dst", required=True, metavar="SPEC", help="The layout after.")
@click.option("--from-sizes", multiple=True, metavar="DIM=SIZES", help="Shard sizes before.")
@click.option("--to-sizes", multiple=True, metavar="DIM=SIZES", help="Shard sizes after.")
@click.option("--to-mesh", metavar="AXES", help="The mesh after, if it is another one.")
@click.option("--to-ranks", metavar="RANKS", help="The ranks of the mesh after.")
@click.option("--rank", type=int, help="Show what this rank sends and receives.")
@click.option("--draw/--no-draw", "drawn", default=True, help="Draw both layouts.")
@explained
def plan(
    mesh: str, ranks: str | None, shape: str | None, dtype: str | None, out: Path | None,
    src: str, dst: str, from_sizes: Sequence[str], to_sizes: Sequence[str],
    to_mesh: str | None, to_ranks: str | None, rank: int | None, drawn: bool,
) -> None:
    """Plan the way from one layout to another.

    Prints the steps, the bytes that they move, and both layouts.

    \b
    weft plan --mesh dp=2,tp=4 --shape 1024,4096 --from 'P(dp,tp)' --to 'P(tp,dp)'
    """
    before = _mesh(mesh, ranks)
    other = to_mesh is not None or to_ranks is not None
    after = _mesh(to_mesh or mesh, to_ranks, "--to-mesh", "--to-ranks") if other else before
    source, own = _layout(before, src, shape, from_sizes, "--from", "--from-sizes")
    shape = ",".join(map(str, source.shape)) or "()"
    target, _ = _layout(after, dst, shape, to_sizes, "--to", "--to-sizes")
    name = _dtype(dtype or own or "float32", source, target)
    made = make_plan(source, target, dtype=name)
    of_rank = [] if rank is None else ["", *rank_lines(made, rank, "--rank")]
    _check(out)
    drawing = draw(made, width=width())
    if drawn:
        print_drawing(drawing)
    else:
        click.echo(made)
    for line in of_rank:
        click.echo(line)
    _write(drawing, out)


def _mesh(text: str, ranks: str | None, call: str = "--mesh", ranks_call: str = "--ranks") -> Mesh:
    return parse_mesh(text, None if ranks is None else parse_ranks(ranks, ranks_call), call)


def _layout(
    mesh: Mesh, text: str | None, shape: str | None, sizes: Sequence[str], call: str,
    sizes_call: str = "--sizes",
) -> tuple[Layout, str | None]:
    return read_layout(
        mesh, text, None if shape is None else parse_shape(shape, "--shape"),
        parse_sizes(sizes, sizes_call), call,
    )


def _dtype(text: str | None, *layouts: Layout) -> str | None:
    if text is None:
        return None
    name = dtype_name(text, "--dtype")
    for layout in layouts:
        layout.check_dtype(name)
    return name


def _check(out: Path | None) -> None:
    if out is not None and out.suffix not in (".svg", ".png", ".txt"):
        raise RefusedError(
            message(f"--out {out}", f"{out.name!r} ends in {out.suffix!r}",
                    "a drawing is written as .svg, .png or .txt", [str(out)],
                    f"--out {out.with_suffix('.svg')}")
        )


def _write(drawing: Drawing, out: Path | None) -> None:
    if out is None:
        return
    if out.suffix == ".png":
        write_png(drawing.scene, out)
    else:
        drawing.write(out)
    click.echo(f"\nWritten to {out}")
