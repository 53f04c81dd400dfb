"""`weft plan`: the way from one layout to another, without any processes."""

from __future__ import annotations

from collections.abc import Sequence

import click

from weft.cli.options import check_out, dtype_of, layout_of, mesh_of, mesh_options, write_out
from weft.cli.terminal import explained, print_drawing, width
from weft.drawing import show as draw
from weft.drawing.one_rank import rank_lines
from weft.planner import plan as make_plan

__all__ = ["plan"]


@click.command()
@mesh_options
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
    mesh: str, ranks: str | None, shape: str | None, dtype: str | None, out: str | None,
    src: str, dst: str, from_sizes: Sequence[str], to_sizes: Sequence[str],
    to_mesh: str | None, to_ranks: str | None, rank: int | None, drawn: bool,
) -> None:
    """Plan the way from one layout to another.

    Prints the steps, the bytes that they move, and both layouts.

    \b
    weft plan --mesh dp=2,tp=4 --shape 1024,4096 --from 'P(dp,tp)' --to 'P(tp,dp)'
    """
    before = mesh_of(mesh, ranks)
    other = to_mesh is not None or to_ranks is not None
    after = mesh_of(to_mesh or mesh, to_ranks, "--to-mesh", "--to-ranks") if other else before
    source, own = layout_of(before, src, shape, from_sizes, "--from", "--from-sizes")
    shape = ",".join(map(str, source.shape)) or "()"
    target, _ = layout_of(after, dst, shape, to_sizes, "--to", "--to-sizes")
    name = dtype_of(dtype or own or "float32", source, target)
    made = make_plan(source, target, dtype=name)
    of_rank = [] if rank is None else ["", *rank_lines(made, rank, "--rank")]
    check_out(out)
    drawing = draw(made, width=width())
    if drawn:
        print_drawing(drawing)
    else:
        click.echo(made)
    for line in of_rank:
        click.echo(line)
    write_out(drawing, out)
