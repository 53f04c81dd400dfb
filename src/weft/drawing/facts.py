"""The words beside a picture: the layout in a line, the meaning of rows, columns and signs."""

from __future__ import annotations

import math
from collections.abc import Iterable

from weft.core import Layout, Mesh
from weft.core.encoding import text
from weft.drawing.blocks import Grid
from weft.drawing.ranks import rank_set

__all__ = ["axes_text", "mesh_text", "named", "notes", "title"]

_FEW = 8
_COUNTED = 2**20
"""Shards of a dim whose sizes are looked at."""


def title(layout: Layout, dtype: str | None = None) -> str:
    """The layout's own text, with few of many explicit sizes: `f32[8@dp, 16]`."""
    sizes = {dim: _few(sizes) for dim, sizes in layout.explicit_sizes.items()}
    return text(layout, dtype, sizes)


def named(layout: Layout, dtype: str | None = None) -> str:
    """The title, and the mesh: `[8@dp, 16] on Mesh(dp=2): 2 ranks`."""
    return f"{title(layout, dtype)} on {mesh_text(layout.mesh)}"


def mesh_text(mesh: Mesh) -> str:
    """`Mesh(dp=2, tp=4): 8 ranks`, with their numbers if they are not 0, 1, 2, ..."""
    if mesh.ranks is None:
        return f"{mesh}: {_ranks_text(mesh.size())}"
    names = rank_set(mesh, [0], [(mesh.size(), 1)]).texts()
    in_order = list(mesh.ranks) == sorted(mesh.ranks)
    return f"{mesh}: ranks {names[0]}" + ("" if in_order else ", in an order of their own")


def notes(grid: Grid, prefixed: bool) -> list[tuple[str, str]]:
    """The lines below a picture, as (sign or word, its meaning).

    `prefixed`: whether blocks themselves say that their numbers are ranks.
    """
    layout = grid.layout
    words = dict(zip(grid.dims, ("rows", "columns") if len(grid.dims) == 2 else ("columns",)))
    words |= dict.fromkeys(grid.outer, "panels")
    out = [(words[dim], _dim_text(layout, dim)) for dim in sorted(words, key=lambda dim: (
        ("panels", "rows", "columns").index(words[dim]), dim))]
    rest = [dim for dim in range(layout.ndim) if dim not in words]
    if rest:
        out.append(("whole", ", ".join(f"dim {dim}: {layout.shape[dim]}" for dim in rest)))
    cells = [] if prefixed else [("cells", "the ranks that hold each block")]
    return out + _axes_notes(layout) + cells + _sign_notes(grid)


def axes_text(layout: Layout, dim: int) -> str:
    """`dim 0 over dp`"""
    axes = _names(layout.mesh, layout.dims[dim])
    return f"dim {dim} over {axes}" if axes else f"dim {dim}"


def _dim_text(layout: Layout, dim: int) -> str:
    count, length = layout.num_shards(dim), layout.shape[dim]
    axes = _names(layout.mesh, layout.dims[dim])
    if not axes:
        return f"dim {dim}: {length}, whole"
    return f"dim {dim}: {length} over {axes}, {_shards_text(layout, dim, count)}"


def _shards_text(layout: Layout, dim: int, count: int) -> str:
    shards = f"{count:,} shard{'s' if count > 1 else ''}"
    if count > _COUNTED and layout.cuts[dim] is None:
        return shards
    sizes = layout.sizes_of(dim)
    if min(sizes) == max(sizes):
        return f"{shards} of {sizes[0]}"
    if count <= _FEW:
        return f"{shards} of {', '.join(map(str, sizes))}"
    return f"{shards} of {min(sizes)} to {max(sizes)}"


def _axes_notes(layout: Layout) -> list[tuple[str, str]]:
    mesh = layout.mesh
    copies = layout.free_axes
    out: list[tuple[str, str]] = []
    if copies:
        number = math.prod(mesh.axis_sizes[axis] for axis in copies)
        what = "the whole tensor"
        if layout.is_partial or layout.sharded_axes:
            what = "each partial value" if layout.is_partial else "each block"
        out.append(("copies", f"{what} on {_ranks_text(number)}, over {_names(mesh, copies)}"))
    kinds: dict[str, list[int]] = {}
    for axis, kind in enumerate(layout.partial):
        if kind:
            kinds.setdefault(kind, []).append(axis)
    if kinds:
        number = math.prod(mesh.axis_sizes[axis] for axes in kinds.values() for axis in axes)
        how = ", ".join(f"{kind} over {_names(mesh, axes)}" for kind, axes in kinds.items())
        values = f"{number:,} partial value{'s' if number > 1 else ''} of each element"
        out.append(("partial", f"{values}, to be reduced: {how}"))
    return out


def _sign_notes(grid: Grid) -> list[tuple[str, str]]:
    layout = grid.layout
    out: list[tuple[str, str]] = []
    if any(band.is_empty and band.last > band.first for found in grid.of for band in found):
        out.append(("∅", "holds no element"))
    hidden: dict[str, list[int]] = {}
    for dim, found in enumerate(grid.of):
        number = sum(band.last - band.first for band in found if band.hidden)
        if number:
            what = f"{number:,} of {layout.num_shards(dim):,} shards"
            hidden.setdefault(what, []).append(dim)
    if hidden:
        parts = [f"{what} of dim{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))}"
                 for what, dims in hidden.items()]
        out.append(("…", f"not drawn: {'; '.join(parts)}"))
    return out


def _few(sizes: tuple[int, ...]) -> tuple[object, ...]:
    return sizes if len(sizes) <= _FEW else (*sizes[:3], "…", sizes[-1])


def _names(mesh: Mesh, axes: Iterable[int]) -> str:
    return ",".join(str(mesh.axis_names[axis]) for axis in axes)


def _ranks_text(number: int) -> str:
    return f"{number:,} ranks" if number > 1 else "1 rank"
