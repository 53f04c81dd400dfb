"""The redistributions that are measured.

Those on 2x4 are pairs for which other systems are known to move several times the bytes that are
missing; those on one axis are the moves that everybody makes. Uneven ones have lengths that no axis
divides, ragged ones shards of any sizes. Of partial rows a backend's own collectives move what
they like: bytes are counted where there are none.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core import Layout, Mesh, P

__all__ = ["ROWS", "Row", "layouts_of", "shape_of"]

GRID, LINE = Mesh({"a": 2, "b": 4}), Mesh({"x": 4})


@dataclass(frozen=True, slots=True)
class Row:
    """One redistribution; `parts` are the shards of a ragged dim 0, in parts of the whole."""

    name: str
    mesh: Mesh
    src: P
    dst: P
    uneven: bool = False
    parts: tuple[int, ...] = ()


_GRID = {
    "S0 S1 -> S1 S0": (P("a", "b"), P("b", "a")),
    "S0 S0 -> S1 S1": (P(("a", "b")), P(None, ("a", "b"))),
    "S0 R -> R S0": (P("a"), P("b")),
    "S0 S1 -> R S0": (P("a", "b"), P("b")),
    "R S0 -> S0 S0": (P("b"), P(("a", "b"))),
}
_LINE = {
    "S0 -> S1": (P("x"), P(None, "x")),
    "S1 -> S0": (P(None, "x"), P("x")),
    "S0 -> R": (P("x"), P()),
    "P -> R": (P(partial={"x": "sum"}), P()),
    "P -> S0": (P(partial={"x": "sum"}), P("x")),
}
_RAGGED = {
    "S0 ragged -> S0": (P("x"), P("x")),
    "S0 ragged -> S1": (P("x"), P(None, "x")),
}

ROWS = [
    Row(name + (", uneven" if uneven else ""), mesh, *pair, uneven=uneven)
    for mesh, pairs in ((GRID, _GRID), (LINE, _LINE))
    for uneven in (False, True)
    for name, pair in pairs.items()
] + [Row(name, LINE, *pair, parts=(6, 3, 4, 7)) for name, pair in _RAGGED.items()]


def shape_of(row: Row, nbytes: int) -> tuple[int, int]:
    """A matrix of float32 of about so many bytes, twice as long as wide."""
    width = max(8, round((nbytes / 8) ** 0.5) // 8 * 8)
    length = 2 * width
    return (length + 3, width - 3) if row.uneven else (length, width)


def layouts_of(row: Row, nbytes: int, mesh: Mesh | None = None) -> tuple[Layout, Layout]:
    """The two layouts of a row, on its mesh or on that mesh bound to ranks."""
    mesh, shape = mesh or row.mesh, shape_of(row, nbytes)
    cuts = {}
    if row.parts:
        sizes = [shape[0] * part // sum(row.parts) for part in row.parts]
        cuts = {0: (*sizes[:-1], shape[0] - sum(sizes[:-1]))}
    return Layout(mesh, shape, row.src, sizes=cuts), Layout(mesh, shape, row.dst)
