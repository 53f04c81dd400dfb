"""Across two meshes: which device gives which part of a tensor to which.

Theory of operation. A *cell* is what one device holds at the source: a shard index per dim, and a
digit per axis of terms that stay terms. `num` devices hold the same cell, its *copies*. A device
that wants a part of a cell at the target takes it from the nearest class of holders that has one:

1. itself;
2. a holder on its node (device ids that are equal when divided by `node_size`);
3. any holder.

Within a class the load is shared out. The takers stand in a line, each as long as the part it
takes; the line is cut into equal shares, one per holder in order, and the holder of the share in
which a taker begins serves it. So loads differ by less than two parts. In class 2 the line is
that of one node. In class 3 it runs through the target's cells in row-major order and, in each
cell, through its copies: the place of a taker is arithmetic, and so are the takers of a holder,
however large the meshes are. Takers whom a nearer class serves leave a line of up to `LISTED`
takers; on a longer one they keep their place, and balance is that of those who stay.

All of it is a pure function of the two layouts and the node size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

from weft.core.layout import Box, Layout
from weft.core.mesh import Mesh
from weft.planner.geometry import Coordinate, intersect, meets, volume

__all__ = ["LISTED", "Crossing", "Side", "crossing"]

LISTED = 64
"""Lines of up to so many takers are listed."""

Cell = tuple[int, ...]
"""Shard index per dim, then digit per axis of terms."""


class Side:
    """One of the two layouts: its cells, and the devices that hold copies of each."""

    __slots__ = ("layout", "terms", "free", "num", "_places")

    def __init__(self, layout: Layout) -> None:
        mesh = layout.mesh
        cutting = {axis for axes in layout.dims for axis in axes}
        terms = [axis for axis, kind in enumerate(layout.partial) if kind]
        self.layout = layout
        # Terms stay terms axis by axis, by name: both sides list them alike.
        self.terms = sorted(terms, key=lambda axis: str(mesh.axis_names[axis]))
        self.free = [axis for axis in range(mesh.ndim) if axis not in cutting | set(terms)]
        self.num = math.prod([mesh.axis_sizes[axis] for axis in self.free])
        lists = [*layout.dims, *([axis] for axis in self.terms), self.free]
        self._places = [_strides(mesh, axes) for axes in lists]

    def at(self, rank: int) -> Coordinate | None:
        """The coordinate of a device; None outside the mesh."""
        mesh = self.layout.mesh
        position = mesh.position_of_rank(rank)
        return None if position is None else mesh.coordinate(position)

    def cell(self, at: Coordinate) -> Cell:
        """The cell at a coordinate."""
        indices = [self.layout.shard_index(dim, at) for dim in range(self.layout.ndim)]
        return (*indices, *self.term(at))

    def term(self, at: Coordinate) -> tuple[int, ...]:
        """Which term of the reductions that remain a coordinate holds."""
        return tuple([at[axis] for axis in self.terms])

    def box(self, cell: Cell) -> Box:
        """What a cell contains."""
        return tuple([self.layout.interval(dim, cell[dim]) for dim in range(self.layout.ndim)])

    def copy(self, at: Coordinate) -> int:
        """Which copy of its cell a coordinate holds."""
        number = 0
        for axis in self.free:
            number = number * self.layout.mesh.axis_sizes[axis] + at[axis]
        return number

    def rank(self, cell: Cell, copy: int) -> int:
        """The device that holds a copy of a cell."""
        position = 0
        for places, index in zip(self._places, (*cell, copy)):
            for size, stride in places:
                index, digit = divmod(index, size)
                position += digit * stride
        return self.layout.mesh.rank_at(position)

    def cells_in(self, box: Box, digits: Cell) -> Iterator[tuple[Cell, Box]]:
        """The cells that meet a box, for given digits of terms, and what they have of it."""
        found = [meets(self.layout, dim, interval) for dim, interval in enumerate(box)]
        for choice in product(*found):
            indices = tuple(index for index, _, _ in choice)
            yield (*indices, *digits), tuple((start, stop) for _, start, stop in choice)


def _strides(mesh: Mesh, axes: Sequence[int]) -> list[tuple[int, int]]:
    """(size, stride) of axes, the last first; axes that follow one another in the mesh are one."""
    out: list[tuple[int, int]] = []
    for axis in reversed(axes):
        size, stride = mesh.axis_sizes[axis], mesh.axis_strides[axis]
        if out and out[-1][0] * out[-1][1] == stride:
            out[-1] = (out[-1][0] * size, out[-1][1])
        else:
            out.append((size, stride))
    return out


class Crossing:
    """Who takes what from whom between two layouts on two meshes."""

    def __init__(self, src: Layout, dst: Layout, node_size: int) -> None:
        self.src, self.dst, self.node_size = Side(src), Side(dst), node_size
        (a, b), (c, d) = _span(src.mesh), _span(dst.mesh)
        # Only where the meshes come near each other can a taker have a holder nearby.
        self.meshes_meet = a // node_size <= (d - 1) // node_size and (
            c // node_size <= (b - 1) // node_size
        )
        self._lines: dict[Cell, _Line] = {}

    def receives(self, rank: int) -> list[tuple[int, Box]]:
        """(holder, box) for every part of the target box of a device, itself included."""
        at = self.dst.at(rank)
        if at is None:
            return []
        own = self._cell_of(rank)
        digits = self.dst.term(at)
        out = []
        for cell, box in self.src.cells_in(self.dst.layout.box_at(at), digits):
            holder = rank if cell == own else self._holder(cell, rank, at, box)
            out.append((holder, box))
        return sorted(out)

    def sends(self, rank: int) -> list[tuple[int, Box]]:
        """(taker, box) for every part that is taken of the source box of a device."""
        at = self.src.at(rank)
        if at is None:
            return []
        cell = self.src.cell(at)
        out = []
        if self.meshes_meet:
            mine = self._wanted(rank, cell)
            if mine is not None:
                out.append((rank, mine))
            out += self._sent_on_node(cell, rank)
        if volume(self.src.box(cell)):
            out += self._line(cell).sent(self.src.copy(at))
        return sorted(out)

    def holds(self, rank: int) -> Box | None:
        """What a device of both meshes holds of the term that it is to have, else None."""
        at, to = self.src.at(rank), self.dst.at(rank)
        if at is None or to is None or self.src.term(at) != self.dst.term(to):
            return None
        return self.src.layout.box_at(at)

    def _cell_of(self, rank: int) -> Cell | None:
        """What a device holds at the source, if it has a place there."""
        at = self.src.at(rank)
        return None if at is None else self.src.cell(at)

    def _wanted(self, rank: int, cell: Cell) -> Box | None:
        """The part of a cell that a device wants, if any."""
        at = self.dst.at(rank)
        if at is None:
            return None
        if self.dst.term(at) != cell[self.src.layout.ndim:]:
            return None
        return intersect(self.src.box(cell), self.dst.layout.box_at(at))

    def _holder(self, cell: Cell, taker: int, at: Coordinate, box: Box) -> int:
        if self.meshes_meet:
            near = self.on_node(cell, taker)
            if near is not None:
                return next(
                    holder for holder, served in _shares(*near) if taker in dict(served)
                )
        copy = self._line(cell).copy_for(taker, self.dst.copy(at), box)
        return self.src.rank(cell, copy)

    def on_node(
        self, cell: Cell, rank: int
    ) -> tuple[list[int], list[tuple[int, Box]]] | None:
        """Holders and takers of a cell on the node of a device; None without a holder."""
        first = rank // self.node_size * self.node_size
        holders, takers = [], []
        for device in range(first, first + self.node_size):
            if self._cell_of(device) == cell:
                holders.append(device)
            else:
                box = self._wanted(device, cell)
                if box is not None:
                    takers.append((device, box))
        return (holders, takers) if holders else None

    def _sent_on_node(self, cell: Cell, rank: int) -> list[tuple[int, Box]]:
        near = self.on_node(cell, rank)
        return [] if near is None else dict(_shares(*near)).get(rank, [])

    def _line(self, cell: Cell) -> _Line:
        line = self._lines.get(cell)
        if line is None:
            line = self._lines[cell] = _Line(self, cell)
        return line


class _Line:
    """The takers of a cell whom no nearer class serves, and the copies that serve them."""

    def __init__(self, crossing: Crossing, cell: Cell) -> None:
        self.crossing, self.cell = crossing, cell
        self.box = crossing.src.box(cell)
        self.length = volume(self.box) * crossing.dst.num
        self.listed: dict[int, list[tuple[int, Box]]] | None = None
        if crossing.meshes_meet:
            self.listed = self._list()

    def _list(self) -> dict[int, list[tuple[int, Box]]] | None:
        """Copy -> takers, for a short line without those whom a nearer class serves."""
        takers = []
        for number, (_, rank, box) in enumerate(self._walk(0, self.length)):
            if number == LISTED:
                return None
            if not self._served(rank):
                takers.append((rank, box))
        return dict(_shares(range(self.crossing.src.num), takers))

    def _served(self, rank: int) -> bool:
        crossing = self.crossing
        return crossing.meshes_meet and (
            crossing._cell_of(rank) == self.cell or crossing.on_node(self.cell, rank) is not None
        )

    def sent(self, copy: int) -> list[tuple[int, Box]]:
        """(taker, box) of those whom a copy serves."""
        if self.listed is not None:
            return self.listed.get(copy, [])
        num = self.crossing.src.num
        start, stop = -(-copy * self.length // num), -(-(copy + 1) * self.length // num)
        return [
            (rank, box) for begin, rank, box in self._walk(start, stop)
            if begin >= start and not self._served(rank)
        ]

    def copy_for(self, taker: int, copy: int, box: Box) -> int:
        """The copy that serves a taker, who is a copy of its own cell and wants `box`."""
        if self.listed is not None:
            return next(at for at, served in self.listed.items() if (taker, box) in served)
        before, volume_before = 0, self.crossing.dst.num
        rest = volume(self.box)
        for (start, stop), (low, high) in zip(box, self.box):
            rest //= high - low
            before += volume_before * (start - low) * rest
            volume_before *= stop - start
        begin = before + copy * volume(box)
        return begin * self.crossing.src.num // self.length

    def _walk(self, start: int, stop: int) -> Iterator[tuple[int, int, Box]]:
        """(begin, rank, box) of the takers that the stretch of the line from start to stop meets.

        The first of them may begin before `start`.
        """
        dst = self.crossing.dst
        digits = self.cell[dst.layout.ndim:]
        while start < stop:
            at, scale, rest = start, dst.num, volume(self.box)
            indices, box = [], []
            for dim, (low, high) in enumerate(self.box):
                rest //= high - low
                element = low + at // (scale * rest)
                ((index, begin, _),) = meets(dst.layout, dim, (element, element + 1))
                first, last = dst.layout.interval(dim, index)
                begin, end = max(first, low), min(last, high)
                at -= (begin - low) * scale * rest
                scale *= end - begin
                indices.append(index)
                box.append((begin, end))
            copy, inside = divmod(at, volume(tuple(box)))
            yield start - inside, dst.rank((*indices, *digits), copy), tuple(box)
            start += volume(tuple(box)) - inside


def _shares(
    holders: range | list[int], takers: list[tuple[int, Box]]
) -> list[tuple[int, list[tuple[int, Box]]]]:
    """(holder, its takers): the line of takers cut into equal shares."""
    total = sum(volume(box) for _, box in takers)
    served: dict[int, list[tuple[int, Box]]] = {}
    begin = 0
    for taker, box in takers:
        place = begin * len(holders) // total
        served.setdefault(holders[place], []).append((taker, box))
        begin += volume(box)
    return list(served.items())


@lru_cache(maxsize=1024)
def crossing(src: Layout, dst: Layout, node_size: int) -> Crossing:
    """The one crossing of two layouts."""
    return Crossing(src, dst, node_size)


@lru_cache(maxsize=1024)
def _span(mesh: Mesh) -> tuple[int, int]:
    return mesh.rank_span
