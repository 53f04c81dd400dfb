"""A plan of many tensors carried out on one rank: bucket by bucket, one exchange each.

A rank holds one bucket to send and one to receive. A bucket is ordered by the other ranks, and for
each of them by tensors, as the plan lists them: both sides know that order. New local tensors are
made when their first piece arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.comm import Communicator
from weft.core.layout import Box
from weft.planner.geometry import volume
from weft.planner.moving import Moving, Piece, Route, piece_of
from weft.transport import boxes, traffic
from weft.transport.boxes import shape_of

__all__ = ["StateMove"]


class StateMove:
    """What one rank does for a plan; `move(xs, make)` gives its new local tensors.

    All ranks of the communicator call it, those without a part in some tensor as well.

    Args:
        plan: the same on all ranks.
        comm: over the ranks of all meshes.
        rank: this rank's number in the world.
    """

    def __init__(self, plan: Moving, comm: Communicator, rank: int) -> None:
        self.comm = comm
        places = {other: place for place, other in enumerate(comm.ranks)}
        known = {route: _ends(route, rank) for route in dict.fromkeys(plan.routes)}
        ends = [known[route] for route in plan.routes]
        self.kept = [
            None if box is None or not volume(box)
            else (boxes.part(box, src.outer), boxes.part(box, dst.outer))
            for box, (src, dst) in zip([route.keeps(rank) for route in plan.routes], ends)
        ]
        self.buckets = [
            (getattr(torch, plan.moves[pieces[0].tensor].dtype),
             _Buffer(pieces, [src for src, _ in ends], places),
             _Buffer(pieces, [dst for _, dst in ends], places))
            for pieces in plan.buckets
        ]

    def move(self, xs: Sequence[Tensor], make: Callable[[int], Tensor]) -> list[Tensor]:
        """The new local tensors of this rank.

        Args:
            xs: this rank's local tensors; empty ones outside a tensor's source.
            make: a new local tensor, by the number of the tensor.
        """
        made: dict[int, Tensor] = {}

        def at(tensor: int) -> Tensor:
            """The new local tensor, with what this rank has of it already."""
            found = made.get(tensor)
            if found is None:
                found, kept = made.setdefault(tensor, make(tensor)), self.kept[tensor]
                if kept is not None:
                    kept[1](found).copy_(kept[0](xs[tensor]))
            return found

        for dtype, send, recv in self.buckets:
            data = torch.empty(sum(send.counts), dtype=dtype, device=self.comm.device)
            for place, tensor, part in send.places(data):
                place.copy_(part(xs[tensor]))
            nbytes = sum(recv.counts) * data.element_size()
            with traffic.sending(self.comm, "a state", "AllToAll", nbytes):
                got = self.comm.all_to_all(data, send.counts, recv.counts)
            del data
            for place, tensor, part in recv.places(got):
                part(at(tensor)).copy_(place)
        return [at(tensor) for tensor in range(len(xs))]


class _End(NamedTuple):
    """What this rank sends or receives on one route, and the box that it holds there."""

    outer: Box
    parts: list[tuple[int, Box]]


class _Buffer:
    """What this rank sends or receives in one bucket, in order; `counts`: elements, by the place of
    the other rank."""

    def __init__(
        self, pieces: Sequence[Piece], ends: Sequence[_End], places: Mapping[int, int]
    ) -> None:
        found = sorted([
            (places[other], tensor, box) for tensor, number, num_pieces in pieces
            for other, whole in ends[tensor].parts
            if volume(box := piece_of(whole, number, num_pieces))
        ], key=itemgetter(0))
        self.counts = [0] * len(places)
        for place, _, box in found:
            self.counts[place] += volume(box)
        self._sizes = [volume(box) for _, _, box in found]
        self._parts = [
            (shape_of(box), tensor, boxes.part(box, ends[tensor].outer)) for _, tensor, box in found
        ]

    def places(self, data: Tensor) -> Iterator[tuple[Tensor, int, boxes.Move]]:
        """The place of each piece in the buffer, its tensor, and what finds it there."""
        for place, (shape, tensor, part) in zip(data.split(self._sizes), self._parts):
            yield place.view(shape), tensor, part


def _ends(route: Route, rank: int) -> tuple[_End, _End]:
    held: list[Any] = []
    for layout in (route.src, route.dst):
        at = layout.mesh.coordinate_of_rank(rank)
        held.append(() if at is None else layout.box_at(at))
    if route.src == route.dst:
        return _End(held[0], []), _End(held[1], [])
    return _End(held[0], route.sends(rank)), _End(held[1], route.receives(rank))
