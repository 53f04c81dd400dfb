"""`weft show`: a layout drawn, without any processes."""

from __future__ import annotations

from collections.abc import Sequence

import click

from weft.cli.options import check_out, dtype_of, layout_of, mesh_of, mesh_options, write_out
from weft.cli.terminal import explained, print_drawing, width
from weft.drawing import show as draw

__all__ = ["show"]


@click.command()
@click.argument("layout", required=False)
@mesh_options
@click.option("--spec", help="P(dp,tp), placements '[Shard(0), Replicate()]', or an op-sharding "
                             "'{devices=[2,4]<=[8]}'. Replicated by default.")
@click.option("--sizes", multiple=True, metavar="DIM=SIZES",
              help="Shard sizes of a dim: 0=6,3,4,7, or 0=balanced. May be repeated.")
@explained
def show(
    layout: str | None, mesh: str, ranks: str | None, shape: str | None, dtype: str | None,
    out: str | None, spec: str | None, sizes: Sequence[str],
) -> None:
    """Draw a layout: its blocks, and the ranks that hold them.

    LAYOUT is a layout's own text, as weft prints it, in place of --shape, --spec and --sizes.

    \b
    weft show --mesh dp=2,tp=4 --shape 1024,4096 --spec 'P(dp,tp)'
    weft show --mesh dp=2,tp=4 '[20@dp{6,14}, 64] partial(sum@tp)'
    """
    if layout is not None and spec is not None:
        raise click.UsageError(f"LAYOUT {layout!r} and --spec {spec!r} both say the layout")
    drawn, own = layout_of(mesh_of(mesh, ranks), spec if layout is None else layout, shape, sizes,
                         "--spec" if layout is None else "LAYOUT")
    name = dtype_of(dtype or own, drawn)
    check_out(out)
    drawing = draw(drawn, width=width(), dtype=name)
    print_drawing(drawing)
    write_out(drawing, out)
