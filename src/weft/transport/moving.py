"""A plan of many tensors carried out on one rank: bucket by bucket, one exchange each.

A rank holds one bucket to send and one to receive. A bucket is ordered by the other ranks, and for
each of them by tensors, as the plan lists them: both sides know that order. New local tensors are
made when their first piece arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm import Communicator
from weft.core.layout import Box
from weft.planner.geometry import volume
from weft.planner.moving import Moving, Piece, Route, piece_of
from weft.transport import traffic
from weft.transport.boxes import part, shape_of

__all__ = ["move_all"]


def move_all(
    plan: Moving, xs: Sequence[Tensor], comm: Communicator, rank: int,
    make: Callable[[int], Tensor],
) -> list[Tensor]:
    """The new local tensors of a rank.

    All ranks of the communicator call it, those without a part in some tensor as well.

    Args:
        plan: the same on all ranks.
        xs: this rank's local tensors; empty ones outside a tensor's source.
        comm: over the ranks of all meshes.
        rank: this rank's number in the world.
        make: a new local tensor, by the number of the tensor.
    """
    run = _Run(plan, xs, comm, rank, make)
    for number, dtype in enumerate(run.dtypes):
        run.bucket(number, dtype)
    return [run.at(number) for number in range(len(xs))]


class _Run:
    def __init__(
        self, plan: Moving, xs: Sequence[Tensor], comm: Communicator, rank: int,
        make: Callable[[int], Tensor],
    ) -> None:
        self.plan, self.xs, self.comm, self.rank, self.make = plan, xs, comm, rank, make
        self.dtypes = [getattr(torch, plan.moves[one[0].tensor].dtype) for one in plan.buckets]
        self.made: dict[int, Tensor] = {}
        self.places = {other: place for place, other in enumerate(comm.ranks)}
        self._ends: dict[int, tuple[_End, _End]] = {}

    def bucket(self, number: int, dtype: torch.dtype) -> None:
        """Exchange one bucket."""
        pieces = self.plan.buckets[number]
        send = sorted(self._cut(pieces, 0), key=lambda one: one[0])
        recv = sorted(self._cut(pieces, 1), key=lambda one: one[0])
        sent, received = self._sizes(send), self._sizes(recv)
        data = torch.empty(sum(sent), dtype=dtype, device=self.comm.device)
        _each(data, send, lambda place, box, tensor: place.copy_(
            part(box, self._ends_of(tensor)[0].outer)(self.xs[tensor])))
        nbytes = sum(received) * data.element_size()
        traffic.emit("a state", tuple(map(str, self.comm.axes)), "AllToAll", nbytes)
        got = self.comm.all_to_all(data, sent, received)
        del data
        _each(got, recv, lambda place, box, tensor: part(
            box, self._ends_of(tensor)[1].outer)(self.at(tensor)).copy_(place))

    def at(self, tensor: int) -> Tensor:
        """The new local tensor, with what this rank has of it already."""
        found = self.made.get(tensor)
        if found is None:
            found = self.made[tensor] = self.make(tensor)
            route = self.plan.routes[tensor]
            kept = route.keeps(self.rank)
            if kept is not None and volume(kept):
                src, dst = self._ends_of(tensor)
                part(kept, dst.outer)(found).copy_(part(kept, src.outer)(self.xs[tensor]))
        return found

    def _cut(self, pieces: Sequence[Piece], end: int) -> Iterator[tuple[int, Box, int]]:
        """(place of the other rank, box, tensor) of what this rank sends (0) or receives (1)."""
        for tensor, number, num_pieces in pieces:
            for other, box in self._ends_of(tensor)[end].parts:
                piece = piece_of(box, number, num_pieces)
                if volume(piece):
                    yield self.places[other], piece, tensor

    def _ends_of(self, tensor: int) -> tuple[_End, _End]:
        route = self.plan.routes[tensor]
        found = self._ends.get(id(route))
        if found is None:
            found = self._ends[id(route)] = _ends(route, self.rank)
        return found

    def _sizes(self, ordered: Sequence[tuple[int, Box, int]]) -> list[int]:
        sizes = [0] * self.comm.size
        for place, group in groupby(ordered, key=lambda one: one[0]):
            sizes[place] = sum(volume(box) for _, box, _ in group)
        return sizes


class _End(NamedTuple):
    """What this rank sends or receives on one route, and the box that it holds there."""

    outer: Box
    parts: list[tuple[int, Box]]


def _ends(route: Route, rank: int) -> tuple[_End, _End]:
    boxes = []
    for layout in (route.src, route.dst):
        at = layout.mesh.coordinate_of_rank(rank)
        boxes.append(() if at is None else layout.box_at(at))
    if route.src == route.dst:
        return _End(boxes[0], []), _End(boxes[1], [])
    return _End(boxes[0], route.sends(rank)), _End(boxes[1], route.receives(rank))


def _each(
    data: Tensor, ordered: Sequence[tuple[int, Box, int]],
    do: Callable[[Tensor, Box, int], object],
) -> None:
    """Call with the place of each piece in a buffer."""
    begin = 0
    for _, box, tensor in ordered:
        size = volume(box)
        do(data[begin : begin + size].view(shape_of(box)), box, tensor)
        begin += size
