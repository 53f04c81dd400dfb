"""Between two meshes: which device sends which part of a tensor to which.

Theory of operation. A *cell* is what one device holds at the source: a shard index per dim, and a
digit per partial axis that stays partial. The devices that hold a cell are its *copies*. A device
that wants a part of a cell at the target, a *taker*, gets it from the nearest class of holders:

1. itself;
2. a holder on its node (device ids that are equal after division by `node_size`);
3. any holder.

Within a class the load is shared. The takers form a line, each as long as the part it takes. The
line is divided into equal shares, one per holder in order, and the holder of the share in which a
taker begins serves it. So loads differ by less than two parts. In class 2 the line is that of one
node. In class 3 it runs through the target's cells in row-major order and, in each cell, through
its copies: the position of a taker is arithmetic, and so are the takers of a holder, however large
the meshes are. If both meshes have at most `LISTED` devices, the line is listed, and takers that a
nearer class serves leave it. On larger meshes they keep their position, so the load of the others
may differ by more.

Where parts may be *divided*, a part that crosses the border of a share is divided there, along its
longest dim. So all holders of a class send equally much, up to a row, also if they are more than
their takers. That takes more messages, which cost nothing where many tensors travel together.

All of this is a pure function of the two layouts and the node size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple, TypeVar

from weft.core.hlo import merged
from weft.core.layout import Box, Layout
from weft.planner.geometry import Coordinate, between, intersect, longest, meets, volume

__all__ = ["LISTED", "Crossing", "Side", "crossing"]

LISTED = 256
"""The largest mesh, in devices, for which the takers of a cell are listed."""

_KEPT = 4096
"""Lines and nodes that a crossing caches."""

K = TypeVar("K")
V = TypeVar("V")

Cell = tuple[int, ...]
"""Shard index per dim, then digit per partial axis."""


class Side:
    """One of the two layouts: its cells, and the devices that hold copies of each."""

    __slots__ = ("layout", "partial_axes", "free", "num_copies", "_places")

    def __init__(self, layout: Layout) -> None:
        mesh = layout.mesh
        partial = [axis for axis, kind in enumerate(layout.partial) if kind]
        self.layout = layout
        # Partial values stay partial axis by axis, by name: both sides list them alike.
        self.partial_axes = sorted(partial, key=lambda axis: str(mesh.axis_names[axis]))
        self.free = layout.free_axes
        self.num_copies = math.prod([mesh.axis_sizes[axis] for axis in self.free])
        lists = [*layout.dims, *([axis] for axis in self.partial_axes), self.free]
        self._places = [  # (size, stride) of axes, the last first
            merged((mesh.axis_sizes[axis], mesh.axis_strides[axis]) for axis in axes)[::-1]
            for axes in lists
        ]

    def at(self, rank: int) -> Coordinate | None:
        """The coordinate of a device; None outside the mesh."""
        return self.layout.mesh.coordinate_of_rank(rank)

    def cell(self, at: Coordinate) -> Cell:
        indices = [self.layout.shard_index(dim, at) for dim in range(self.layout.ndim)]
        return (*indices, *self.partial_digits(at))

    def partial_digits(self, at: Coordinate) -> tuple[int, ...]:
        """Which partial value of the remaining reductions a coordinate holds."""
        return tuple([at[axis] for axis in self.partial_axes])

    def box(self, cell: Cell) -> Box:
        return tuple([self.layout.interval(dim, cell[dim]) for dim in range(self.layout.ndim)])

    def copy(self, at: Coordinate) -> int:
        """Which copy of its cell a coordinate holds."""
        return self.layout.mesh.place_along(self.free, at)

    def rank(self, cell: Cell, copy: int) -> int:
        """The device that holds a copy of a cell."""
        position = 0
        for places, index in zip(self._places, (*cell, copy)):
            for size, stride in places:
                index, digit = divmod(index, size)
                position += digit * stride
        return self.layout.mesh.rank_at(position)

    def cells_in(self, box: Box, digits: Cell) -> Iterator[tuple[Cell, Box]]:
        """The cells that overlap a box, for given digits of partial axes, and the overlaps."""
        found = [meets(self.layout, dim, interval) for dim, interval in enumerate(box)]
        for choice in product(*found):
            indices = tuple(index for index, _, _ in choice)
            yield (*indices, *digits), tuple((start, stop) for _, start, stop in choice)


class _Node(NamedTuple):
    """The devices of one node: what they hold at the source and want at the target."""

    holders: dict[Cell, list[int]]
    takers: list[tuple[int, Cell | None, tuple[int, ...], Box]]  # device, own cell, digits, box


class Crossing:
    """Who takes what from whom between two layouts on two meshes."""

    def __init__(self, src: Layout, dst: Layout, node_size: int, divides: bool) -> None:
        self.src, self.dst, self.node_size = Side(src), Side(dst), node_size
        self.divides = divides
        (a, b), (c, d) = src.mesh.rank_span, dst.mesh.rank_span
        # Only if the meshes come near each other can a taker have a holder nearby.
        self.meshes_meet = a // node_size <= (d - 1) // node_size and (
            c // node_size <= (b - 1) // node_size
        )
        self._lines: dict[Cell, _Line] = {}
        self._nodes: dict[int, _Node] = {}

    def receives(self, rank: int) -> list[tuple[int, Box]]:
        """(holder, box) for every part of the target box of a device, itself included."""
        at = self.dst.at(rank)
        if at is None:
            return []
        own, copy = self.cell_of(rank), self.dst.copy(at)
        out: list[tuple[int, Box]] = []
        for cell, box in self.src.cells_in(self.dst.layout.box_at(at), self.dst.partial_digits(at)):
            near = None if cell == own else self.near(cell, rank)
            if cell == own:
                out.append((rank, box))
            elif near is not None:
                out += _served(near, rank)
            else:
                out += [
                    (self.src.rank(cell, held), part)
                    for held, part in self._line(cell).copies_for(rank, copy, box)
                ]
        return sorted(out)

    def sends(self, rank: int) -> list[tuple[int, Box]]:
        """(taker, box) for every part that others take of the source box of a device."""
        at = self.src.at(rank)
        if at is None:
            return []
        cell = self.src.cell(at)
        held = self.src.box(cell)
        if not volume(held):
            return []
        out = self._line(cell).sent(self.src.copy(at))
        to = self.dst.at(rank)
        if to is not None and self.dst.partial_digits(to) == self.src.partial_digits(at):
            own = intersect(held, self.dst.layout.box_at(to))
            out += [] if own is None else [(rank, own)]
        near = self.near(cell, rank)
        return sorted(out if near is None else out + near.get(rank, []))

    def holds(self, rank: int) -> Box | None:
        """What a device of both meshes already holds of its target, if of the same partial value;
        else None."""
        at, to = self.src.at(rank), self.dst.at(rank)
        if at is None or to is None or self.src.partial_digits(at) != self.dst.partial_digits(to):
            return None
        return self.src.layout.box_at(at)

    def cell_of(self, rank: int) -> Cell | None:
        """The cell that a device holds at the source; None outside its mesh."""
        at = self.src.at(rank)
        return None if at is None else self.src.cell(at)

    def near(self, cell: Cell, rank: int) -> dict[int, list[tuple[int, Box]]] | None:
        """Holder -> its takers, for a cell on the node of a device; None without a holder."""
        if not self.meshes_meet:
            return None
        number = rank // self.node_size
        node = self._nodes.get(number)
        if node is None:
            node = _kept(self._nodes, number, self._list_node(number))
        holders = node.holders.get(cell)
        if holders is None:
            return None
        held, digits = self.src.box(cell), cell[self.src.layout.ndim:]
        takers: list[tuple[int, Box]] = []
        for device, own, its, wanted in node.takers:
            if own != cell and its == digits:
                box = intersect(held, wanted)
                takers += [] if box is None else [(device, box)]
        return _shares(holders, takers, self.divides)

    def _list_node(self, number: int) -> _Node:
        first = number * self.node_size
        node = _Node({}, [])
        for device in range(first, first + self.node_size):
            cell, to = self.cell_of(device), self.dst.at(device)
            if cell is not None:
                node.holders.setdefault(cell, []).append(device)
            if to is not None:
                box = self.dst.layout.box_at(to)
                node.takers.append((device, cell, self.dst.partial_digits(to), box))
        return node

    def _line(self, cell: Cell) -> _Line:
        line = self._lines.get(cell)
        return _kept(self._lines, cell, _Line(self, cell)) if line is None else line


def _kept(store: dict[K, V], key: K, value: V) -> V:
    if len(store) >= _KEPT:
        store.clear()
    store[key] = value
    return value


class _Line:
    """The takers of a cell that no nearer class serves, and the copies that serve them."""

    def __init__(self, crossing: Crossing, cell: Cell) -> None:
        self.crossing, self.cell = crossing, cell
        self.box = crossing.src.box(cell)
        self.length = volume(self.box) * crossing.dst.num_copies
        self.listed: dict[int, list[tuple[int, Box]]] | None = None
        sizes = [side.layout.mesh.size() for side in (crossing.src, crossing.dst)]
        if crossing.divides or (crossing.meshes_meet and max(sizes) <= LISTED):
            takers = [
                (rank, box) for _, rank, box in self._walk(0, self.length)
                if not self._served(rank)
            ]
            self.listed = _shares(range(crossing.src.num_copies), takers, crossing.divides)

    def _served(self, rank: int) -> bool:
        """Whether a nearer class serves a taker: itself, or its node."""
        return self.crossing.meshes_meet and (
            self.crossing.cell_of(rank) == self.cell
            or self.crossing.near(self.cell, rank) is not None
        )

    def sent(self, copy: int) -> list[tuple[int, Box]]:
        """(taker, box) of the takers that a copy serves."""
        if self.listed is not None:
            return list(self.listed.get(copy, ()))
        num = self.crossing.src.num_copies
        start, stop = -(-copy * self.length // num), -(-(copy + 1) * self.length // num)
        return [
            (rank, box) for begin, rank, box in self._walk(start, stop)
            if begin >= start and not self._served(rank)
        ]

    def copies_for(self, taker: int, copy: int, box: Box) -> list[tuple[int, Box]]:
        """The copies that serve a taker, which is copy `copy` of its own cell and wants `box`, and
        what each of them sends."""
        if self.listed is not None:
            return _served(self.listed, taker)
        before, volume_before = 0, self.crossing.dst.num_copies
        rest = volume(self.box)
        for (start, stop), (low, high) in zip(box, self.box):
            rest //= high - low
            before += volume_before * (start - low) * rest
            volume_before *= stop - start
        begin = before + copy * volume(box)
        return [(begin * self.crossing.src.num_copies // self.length, box)]

    def _walk(self, start: int, stop: int) -> Iterator[tuple[int, int, Box]]:
        """(begin, rank, box) of the takers that overlap the part of the line from start to stop.

        The first of them may begin before `start`.
        """
        dst = self.crossing.dst
        digits = self.cell[dst.layout.ndim:]
        while start < stop:
            at, scale, rest = start, dst.num_copies, volume(self.box)
            indices: list[int] = []
            box: list[tuple[int, int]] = []
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
    holders: range | list[int], takers: list[tuple[int, Box]], divides: bool
) -> dict[int, list[tuple[int, Box]]]:
    """Holder -> its takers: the line of takers divided into equal shares."""
    total = sum([volume(box) for _, box in takers])
    served: dict[int, list[tuple[int, Box]]] = {}
    begin = 0
    for taker, box in takers:
        place = begin * len(holders) // total
        parts = _divided(box, begin, total, len(holders)) if divides else [box]
        for at, part in enumerate(parts, place):
            if volume(part):
                served.setdefault(holders[at], []).append((taker, part))
        begin += volume(box)
    return served


def _divided(box: Box, begin: int, total: int, num: int) -> list[Box]:
    """A part that begins at `begin` of a line, divided where one of `num` shares of it ends."""
    size = volume(box)
    first, last = begin * num // total, (begin + size - 1) * num // total
    dim, length = longest(box)
    if first == last or length == 1:
        return [box]
    row = size // length
    borders = [  # rounded to rows
        (2 * (share * total - begin * num) + num * row) // (2 * num * row)
        for share in range(first + 1, last + 1)
    ]
    cuts = [0, *(min(max(at, 0), length) for at in borders), length]
    return [between(box, dim, *ends) for ends in pairwise(cuts)]


def _served(shares: dict[int, list[tuple[int, Box]]], taker: int) -> list[tuple[int, Box]]:
    """(holder, box) of what a taker gets."""
    return [
        (holder, box) for holder, served in shares.items() for device, box in served
        if device == taker
    ]


@lru_cache(maxsize=1024)
def crossing(src: Layout, dst: Layout, node_size: int, divides: bool = False) -> Crossing:
    """The one crossing of two layouts."""
    return Crossing(src, dst, node_size, divides)
