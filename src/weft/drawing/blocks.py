"""The content of a layout's picture: a grid of blocks, and the ranks that hold each.

A layout cuts every dim at the same offsets everywhere, so its blocks form a grid. A picture has
rows and columns, hence two dims. If more dims are sharded, there is one *panel* per block of the
others. Each dim is drawn as *bands*: single shards, consecutive empty shards as
one, and the middle of many shards as one hidden band. So a picture is small for any mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

from weft.core import Layout, Mesh
from weft.core.hlo import Digits
from weft.drawing.ranks import LISTED, RankSet, nth, rank_set

__all__ = ["Band", "Cell", "Grid", "Limits", "bands", "grid", "shares"]

_WINDOW = 128
"""Shards of a dim that are looked at; if there are more, only those at its ends."""


class Band(NamedTuple):
    """Indices `start` to `stop` of a dim: its shards `first` to `last` (exclusive)."""

    start: int
    stop: int
    first: int
    last: int
    hidden: bool = False

    @property
    def is_empty(self) -> bool:
        return self.start == self.stop

    @property
    def scale(self) -> int:
        """Its length, to draw by; what is hidden has none."""
        return 0 if self.hidden else self.stop - self.start


class Cell(NamedTuple):
    """A block: the ranks that hold it, one set per partial value if the layout is partial.

    `partials` are all of `num_partials` sets, or the first two and the last. `rank` is one of the
    ranks, always the same one for the same ranks: it determines the block's colour.
    """

    partials: tuple[RankSet, ...]
    num_partials: int
    is_empty: bool
    kind: str | None
    rank: int

    def texts(self, prefixed: bool = True) -> list[str]:
        """The cell's texts, from the longest to the shortest; the first one says "rank"."""
        texts = self._plain()
        if prefixed and not texts[0].endswith("ranks"):
            ranks = self.num_partials * self.partials[0].num_ranks
            texts = [f"rank{'s' if ranks > 1 else ''} {texts[0]}", *texts]
        return ["∅ " + text for text in texts] if self.is_empty else texts

    def _plain(self) -> list[str]:
        if self.num_partials == 1:
            return self.partials[0].texts()
        out: list[str] = []
        for short in range(max(len(term.texts()) for term in self.partials)):
            names = [term.texts()[min(short, len(term.texts()) - 1)] for term in self.partials]
            out += self._joined([f"({name})" if "," in name else name for name in names])
        return sorted(set(out), key=len, reverse=True)

    def _joined(self, names: Sequence[str]) -> list[str]:
        ends = [names[0], "…", names[-1]]
        shown = [names] if len(names) == self.num_partials else [[*names[:-1], "…", names[-1]]]
        shown += [ends] if self.num_partials > 2 else []
        sign = {"sum": "+", "product": "*"}.get(self.kind or "")
        if sign:
            return [gap.join(each) for each in shown for gap in (f" {sign} ", sign)]
        return [f"{self.kind}({gap.join(each)})" for each in shown for gap in (", ", ",")]


class Limits(NamedTuple):
    """How many bands of a dim, and how many panels, a picture has at most.

    A dim of more bands shows only its ends: `few` bands including the hidden one, or `least` for a
    dim that is drawn as panels, and for every dim once panels are hidden.
    """

    rows: int
    columns: int
    panels: int
    few: int = 7
    least: int = 3


@dataclass(eq=False, repr=False)
class Grid:
    """The picture of a layout, before it has a size.

    `dims` are the dims that are drawn, rows first (one for a single row, none for a scalar);
    `outer` those that are drawn as panels. `of` has the bands of every dim.
    """

    layout: Layout
    dims: tuple[int, ...]
    outer: tuple[int, ...]
    of: tuple[tuple[Band, ...], ...]

    @property
    def rows(self) -> tuple[Band, ...]:
        return self.of[self.dims[0]] if len(self.dims) == 2 else (Band(0, 1, 0, 1),)

    @property
    def columns(self) -> tuple[Band, ...]:
        return self.of[self.dims[-1]] if self.dims else (Band(0, 1, 0, 1),)

    @cached_property
    def panels(self) -> tuple[tuple[Band, ...] | None, ...]:
        """The outer bands of each panel; None for hidden panels, however many."""
        found: list[tuple[Band, ...] | None] = []
        for choice in product(*(self.of[dim] for dim in self.outer)):
            hidden = any(band.hidden for band in choice)
            if not hidden:
                found.append(choice)
            elif found and found[-1] is not None:
                found.append(None)
        return tuple(found)

    @cached_property
    def cells(self) -> tuple[tuple[tuple[Cell | None, ...], ...], ...]:
        """The blocks of each panel that is drawn, row by row; None where a band is hidden."""
        return tuple(
            tuple(tuple(self._cell(panel, row, column) for column in self.columns)
                  for row in self.rows)
            for panel in self.panels if panel is not None
        )

    @property
    def ranks(self) -> set[int]:
        """The ranks that determine the blocks' colours."""
        return {cell.rank for rows in self.cells for row in rows for cell in row if cell}

    def is_prefixed(self, fits: Callable[[str, int], bool]) -> bool:
        """Whether every cell has room for the word "rank"; `fits` knows the room of a column."""
        return all(
            fits(cell.texts()[0], column)
            for rows in self.cells for row in rows for column, cell in enumerate(row) if cell
        )

    def columns_need(self, room: Callable[[str], float], least: float) -> list[float]:
        """The `room` that the shortest texts of each column take; the same for equal columns."""
        needs: dict[tuple[bool, int], float] = {}
        kinds = [(band.hidden, band.stop - band.start) for band in self.columns]
        for rows in self.cells:
            for row in rows:
                for kind, cell in zip(kinds, row):
                    need = room(cell.texts()[-1]) if cell else least
                    needs[kind] = max(needs.get(kind, least), need)
        return [needs.get(kind, least) for kind in kinds]

    @staticmethod
    def sign(row: Band, column: Band) -> str:
        """What stands for hidden blocks."""
        return "⋱" if row.hidden and column.hidden else "⋮" if row.hidden else "…"

    def title(self, panel: tuple[Band, ...]) -> str:
        """Which part of the tensor a panel is, written as an index: `[0:2, :, :]`."""
        parts = [":"] * self.layout.ndim
        for dim, band in zip(self.outer, panel):
            parts[dim] = f"{band.start}:{band.stop}"
        return f"[{', '.join(parts)}]"

    def _cell(self, panel: Sequence[Band], row: Band, column: Band) -> Cell | None:
        chosen = self._chosen(panel, row, column)
        return None if any(band.hidden for band in chosen) else _block(self.layout, chosen)

    def block_shape(self, panel: Sequence[Band], row: Band, column: Band) -> tuple[int, ...]:
        """The lengths, in all dims, of the block where bands meet."""
        return tuple(band.stop - band.start for band in self._chosen(panel, row, column))

    def _chosen(self, panel: Sequence[Band], row: Band, column: Band) -> list[Band]:
        at = dict(zip(self.outer, panel))
        at.update(zip(self.dims, (row, column) if len(self.dims) == 2 else (column,)))
        return [at.get(dim, found[0]) for dim, found in enumerate(self.of)]


def grid(layout: Layout, limits: Limits) -> Grid:
    """How a picture of a layout draws each dim, and their bands.

    Rows and columns are the last two sharded dims; if there are fewer, the last of the others.
    """
    cut = [dim for dim in range(layout.ndim) if layout.num_shards(dim) > 1]
    whole = [dim for dim in range(layout.ndim) if dim not in cut]
    drawn = cut[-2:]
    if len(drawn) < 2:
        drawn = whole[len(whole) - 2 + len(drawn):] + drawn if whole else drawn
    drawn = sorted(drawn)[-2:]
    outer = [dim for dim in cut if dim not in drawn]
    of: dict[int, tuple[Band, ...]] = {}
    for dim, length in enumerate(layout.shape):
        of[dim] = (Band(0, length, 0, 1),)
    of.update((dim, bands(layout, dim, limits.panels, limits.least)) for dim in outer)
    while math.prod(len(of[dim]) for dim in outer) > limits.panels:
        longest = max(outer, key=lambda dim: len(of[dim]))
        if len(of[longest]) <= limits.least:
            break
        of[longest] = bands(layout, longest, limits.least, limits.least)
    few = limits.least + 2 if any(band.hidden for dim in outer for band in of[dim]) else limits.few
    for dim, limit in zip(reversed(drawn), (limits.columns, limits.rows)):
        of[dim] = bands(layout, dim, limit, min(few, limit))
    return Grid(layout, tuple(drawn), tuple(outer), tuple(of[dim] for dim in range(layout.ndim)))


def bands(layout: Layout, dim: int, limit: int, few: int) -> tuple[Band, ...]:
    """The bands of a dim; if there are more than `limit`, `few` of them (3 or more)."""
    count = layout.num_shards(dim)
    ends = min(count, _WINDOW) // 2
    head = [_band(layout, dim, index) for index in range(ends)]
    tail = [_band(layout, dim, index) for index in range(count - ends, count)]
    if count > 2 * ends:
        low, high = layout.interval(dim, ends), layout.interval(dim, count - ends - 1)
        single = count == 2 * ends + 1
        head.append(Band(low[0], high[1], ends, count - ends, hidden=not single))
    out = _joined_empty(head + tail)
    if len(out) > limit:
        before, after = out[: few // 2], out[len(out) - (few - 1) // 2 :]
        middle = out[len(before):len(out) - len(after)]
        out = [*before, Band(middle[0].start, middle[-1].stop, middle[0].first, middle[-1].last,
                             hidden=True), *after]
    return tuple(out)


def _band(layout: Layout, dim: int, index: int) -> Band:
    return Band(*layout.interval(dim, index), index, index + 1)


def _joined_empty(found: Sequence[Band]) -> list[Band]:
    out: list[Band] = []
    for band in found:
        if band.is_empty and out and out[-1].is_empty:
            out[-1] = Band(band.start, band.stop, out[-1].first, band.last)
        else:
            # What is hidden and empty is known: nothing but empty shards.
            out.append(Band(band.start, band.stop, band.first, band.last,
                            band.hidden and not band.is_empty))
    return out


def _block(layout: Layout, chosen: Sequence[Band]) -> Cell:
    mesh = layout.mesh
    along = _digits(mesh, range(mesh.ndim))
    partial = [axis for axis, kind in enumerate(layout.partial) if kind]
    digits = [along[axis] for axis in layout.free_axes]
    listed: list[tuple[Digits, range]] = []
    for dim, band in enumerate(chosen):
        of_dim = _digits(mesh, layout.dims[dim])
        count = band.last - band.first
        run = all(upper == size * lower for (_, upper), (size, lower) in pairwise(of_dim))
        if count == layout.num_shards(dim):
            digits += of_dim
        elif run and count > 1:
            listed.append((of_dim, range(band.first, band.first + 1)))
            digits.append((count, of_dim[-1][1]))
        else:
            listed.append((of_dim, range(band.first, band.last)))
    of_partials = _digits(mesh, partial)
    num_partials = math.prod(size for size, _ in of_partials)
    numbers = range(num_partials) if num_partials <= 4 else (0, 1, num_partials - 1)
    kinds = dict.fromkeys(kind for kind in layout.partial if kind)
    return Cell(
        tuple(_ranks(mesh, listed, digits, nth(of_partials, number)) for number in numbers),
        num_partials, any(band.is_empty for band in chosen), "·".join(kinds) or None,
        mesh.rank_at(sum(nth(of_dim, indices[0]) for of_dim, indices in listed)),
    )


def _digits(mesh: Mesh, axes: Iterable[int]) -> Digits:
    return tuple((mesh.axis_sizes[axis], mesh.axis_strides[axis]) for axis in axes)


def _ranks(
    mesh: Mesh, listed: Sequence[tuple[Digits, range]], digits: Sequence[tuple[int, int]], term: int
) -> RankSet:
    # `listed`: digits whose sums with these numbers are all bases of the set.
    count = math.prod(len(indices) for _, indices in listed)
    if count > LISTED:
        return RankSet(count * math.prod(size for size, _ in digits), 0, None)
    bases = [term]
    for of_dim, indices in listed:
        bases = [base + nth(of_dim, index) for base in bases for index in indices]
    return rank_set(mesh, bases, digits)


def shares(sizes: Sequence[float], total: float, least: Sequence[float]) -> list[float]:
    """Parts of `total` in proportion to `sizes`, each at least its `least`.

    Lengths are to scale if there is room, and never too small to be read. Their sum is `total`, or
    that of `least` where this is more.

    >>> shares([1, 2, 7], 10, [2, 1, 1])
    [2, 1.7777777777777777, 6.222222222222222]
    """
    fixed: dict[int, float] = {}
    while True:
        free = [place for place in range(len(sizes)) if place not in fixed]
        room, whole = total - sum(fixed.values()), sum(sizes[place] for place in free)
        want = {place: room * sizes[place] / whole if whole else room / len(free) for place in free}
        small = {place: least[place] for place in free if want[place] < least[place]}
        if not small:
            return [fixed.get(place, want.get(place, 0)) for place in range(len(sizes))]
        fixed |= small
