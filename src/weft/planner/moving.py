"""Many tensors between meshes, planned together: who sends what to whom, and in which bucket.

Theory of operation. A tensor goes straight from the layout that it has to the one that it gets,
whatever the two meshes are: each rank receives what it lacks of its new box, from the nearest
holder (`holders`), and parts are divided so that all holders of a class send equally much.
Tensors with equal ends have one *route*, which is found once.

Tensors travel in *buckets*: what a rank sends in one bucket takes at most a given number of bytes,
and so does what it receives. A tensor of which some rank moves more is divided: each of its parts
is cut into as many pieces along its longest dim, and each bucket takes one. Buckets are the same on
all ranks, because all ranks know all routes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from weft.core.dtypes import itemsize
from weft.core.layout import Box, Layout
from weft.planner.geometry import between, longest, volume
from weft.planner.holders import crossing
from weft.planner.links import as_links
from weft.planner.overlap import missing_elements

__all__ = ["Move", "Moving", "Piece", "Route", "moving", "piece_of"]


class Move(NamedTuple):
    """What one tensor does; `dtype` is a name such as "float32"."""

    src: Layout
    dst: Layout
    dtype: str


class Piece(NamedTuple):
    """In a bucket: piece `number` of `num_pieces` of each part of a tensor."""

    tensor: int
    number: int
    num_pieces: int


class Route:
    """How tensors travel from one layout to another; all volumes in elements."""

    def __init__(self, src: Layout, dst: Layout, node_size: int) -> None:
        self.src, self.dst = src, dst
        self._crossing = crossing(src, dst, node_size, divides=True)
        meshes = [src.mesh] + [dst.mesh] * (dst.mesh != src.mesh)
        self.ranks = sorted({mesh.rank_at(at) for mesh in meshes for at in range(mesh.size())})

    @cached_property
    def received(self) -> dict[int, int]:
        """Rank -> what it receives from others."""
        return self._totals[0]

    @cached_property
    def sent(self) -> dict[int, int]:
        """Rank -> what it sends to others."""
        return self._totals[1]

    @cached_property
    def _totals(self) -> tuple[dict[int, int], dict[int, int]]:
        received, sent = dict.fromkeys(self.ranks, 0), dict.fromkeys(self.ranks, 0)
        for rank in self.ranks if self.src != self.dst else ():
            for holder, box in self.receives(rank):
                received[rank] += volume(box)
                sent[holder] += volume(box)
        return received, sent

    def sends(self, rank: int) -> list[tuple[int, Box]]:
        """(taker, box) of what a rank sends to others, ascending."""
        return [(to, box) for to, box in self._crossing.sends(rank) if to != rank]

    def receives(self, rank: int) -> list[tuple[int, Box]]:
        """(holder, box) of what a rank receives from others, ascending."""
        return [(by, box) for by, box in self._crossing.receives(rank) if by != rank]

    def keeps(self, rank: int) -> Box | None:
        """What a rank has already; None if nothing."""
        return next((box for by, box in self._crossing.receives(rank) if by == rank), None)

    def num_pieces(self, elements: int) -> int:
        """Into how many pieces parts are cut, so that no rank moves more than `elements` in one;
        more rows than parts have do not help."""
        most = max(*self.received.values(), *self.sent.values(), 0)
        count = -(-most // elements)
        while 1 < count < max(self.src.shape) and max(
            max(each) for each in self._largest(count).values()
        ) > elements:
            count += 1 + count // 8
        return count

    def loads(self, count: int, kinds: Mapping[int, int]) -> list[tuple[int, int, int]]:
        """(kind of ranks, most sent, most received) of the largest of `count` pieces."""
        most: dict[int, tuple[int, int]] = {}
        for rank, (out, in_) in self._largest(count).items():
            sent, received = most.get(kinds[rank], (0, 0))
            most[kinds[rank]] = max(sent, out), max(received, in_)
        return [(kind, *each) for kind, each in most.items() if any(each)]

    def _largest(self, count: int) -> dict[int, tuple[int, int]]:
        """Rank -> what it sends and receives of the largest of `count` pieces."""
        if count <= 1:
            return {rank: (self.sent[rank], self.received[rank]) for rank in self.ranks}
        return {
            rank: (_largest_piece(self.sends(rank), count),
                   _largest_piece(self.receives(rank), count))
            for rank in self.ranks
        }


def _largest_piece(parts: Sequence[tuple[int, Box]], count: int) -> int:
    """Elements of the largest of `count` pieces of all parts."""
    total = 0
    for _, box in parts:
        _, length = longest(box)
        total += volume(box) // length * -(-length // count)
    return total


def piece_of(box: Box, number: int, count: int) -> Box:
    """Piece `number` of `count` of a part, along its longest dim; some are empty if it is short."""
    if count == 1 or not box:
        return box
    dim, length = longest(box)
    return between(box, dim, length * number // count, length * (number + 1) // count)


@dataclass(frozen=True, eq=False)
class Moving:
    """The plan of a state: a route for each tensor, and the buckets."""

    moves: tuple[Move, ...]
    routes: tuple[Route, ...]
    buckets: tuple[tuple[Piece, ...], ...]

    @cached_property
    def bytes_received(self) -> dict[int, int]:
        """Rank -> bytes that it receives from others."""
        return self._sums(lambda route: route.received)

    @cached_property
    def bytes_sent(self) -> dict[int, int]:
        """Rank -> bytes that it sends to others."""
        return self._sums(lambda route: route.sent)

    @cached_property
    def lower_bound(self) -> int:
        """The fewest bytes that all ranks together have to receive."""
        return sum(missing_elements(src, dst) * itemsize(dtype) for src, dst, dtype in self.moves)

    def _sums(self, volumes: Callable[[Route], dict[int, int]]) -> dict[int, int]:
        widths: Counter[Route] = Counter()
        for move, route in zip(self.moves, self.routes):
            widths[route] += itemsize(move.dtype)
        out: Counter[int] = Counter()
        for route, width in widths.items():
            for rank, elements in volumes(route).items():
                out[rank] += elements * width
        return dict(out)


def moving(
    moves: Sequence[Move], bucket_nbytes: int | None = 64 << 20, node_size: int | None = None
) -> Moving:
    """The plan that takes tensors from their layouts to others, together. Neither side is partial.
    A rank sends, and receives, at most `bucket_nbytes` in one bucket. With None there is one bucket
    for each dtype, and a plan takes no time that grows with the ranks."""
    nodes = as_links(None, "reshard").node_size if node_size is None else node_size
    found: dict[tuple[Layout, Layout], Route] = {}
    routes: list[Route] = []
    for src, dst, _ in moves:
        route = found.get((src, dst))
        if route is None:
            route = found[src, dst] = Route(src, dst, nodes)
        routes.append(route)
    return Moving(tuple(moves), tuple(routes), _buckets(moves, routes, bucket_nbytes))


def _buckets(
    moves: Sequence[Move], routes: Sequence[Route], limit: int | None
) -> tuple[tuple[Piece, ...], ...]:
    """The pieces, filled into buckets one after the other: dtype by dtype, and a tensor of each
    route in turn, so that ranks of different routes are busy at once."""
    order = _in_turn(moves, routes)
    if limit is None:
        by_dtype = groupby(order, key=lambda tensor: moves[tensor].dtype)
        return tuple([tuple([Piece(tensor, 0, 1) for tensor in some]) for _, some in by_dtype])
    out: list[tuple[Piece, ...]] = []
    here: list[Piece] = []
    sent, received, dtype = [0], [0], ""
    kinds = _kinds(routes)
    num_kinds = max(kinds.values(), default=-1) + 1
    known: dict[tuple[int, str], tuple[int, list[tuple[int, int, int]]]] = {}
    for tensor in order:
        route, mine = routes[tensor], moves[tensor].dtype
        if (id(route), mine) not in known:
            size = itemsize(mine)
            count = route.num_pieces(max(limit // size, 1))
            known[id(route), mine] = count, [
                (kind, out_ * size, in_ * size)
                for kind, out_, in_ in route.loads(max(count, 1), kinds)
            ]
        count, loads = known[id(route), mine]
        for number in range(count):
            if mine != dtype or any(
                sent[kind] + out_ > limit or received[kind] + in_ > limit
                for kind, out_, in_ in loads
            ):
                out += [tuple(here)] if here else []
                here, sent, received, dtype = [], [0] * num_kinds, [0] * num_kinds, mine
            for kind, out_, in_ in loads:
                sent[kind] += out_
                received[kind] += in_
            here.append(Piece(tensor, number, count))
    return (*out, tuple(here)) if here else tuple(out)


def _in_turn(moves: Sequence[Move], routes: Sequence[Route]) -> list[int]:
    turns = dict.fromkeys(map(id, routes), 0)
    keys: list[tuple[str, int]] = []
    for move, route in zip(moves, routes):
        turns[id(route)] += 1
        keys.append((move.dtype, turns[id(route)]))
    return sorted(range(len(moves)), key=keys.__getitem__)


def _kinds(routes: Iterable[Route]) -> dict[int, int]:
    """Rank -> the number of its kind: ranks of one kind are on the same meshes."""
    meshes = dict.fromkeys(
        mesh for route in dict.fromkeys(routes) for mesh in (route.src.mesh, route.dst.mesh)
    )
    places: dict[int, list[int]] = {}
    for number, mesh in enumerate(meshes):
        for at in range(mesh.size()):
            places.setdefault(mesh.rank_at(at), []).append(number)
    numbers: dict[tuple[int, ...], int] = {}
    return {rank: numbers.setdefault(tuple(on), len(numbers)) for rank, on in places.items()}
