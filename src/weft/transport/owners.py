"""Whole tensors at single ranks: each is sent to its owner, and the result comes back.

For work on whole matrices that does not divide (an iteration of Muon, an eigenvalue decomposition)
each matrix has an owner. All matrices travel together: one all-to-all brings their blocks to the
owners, one brings the blocks of the results back. The layouts determine who sends which block, so
ranks need no further messages. Of replicas the nearest to the owner sends: the owner itself, if it
has the block, else one whose coordinate differs from the owner's on the fewest axes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import _DisableAutocast  # type: ignore[attr-defined]

from weft.comm import BoundMesh
from weft.core import Layout
from weft.transport import traffic
from weft.transport.boxes import shape_of, slices

__all__ = ["ToOwners", "balanced"]

Coordinate = tuple[int, ...]


def balanced(costs: Sequence[float], num_ranks: int) -> list[int]:
    """An owner for each piece of work: the dearest first, each to the rank with the least so far
    (Graham's rule: at most 4/3 of the best)."""
    loads = [(0.0, rank) for rank in range(num_ranks)]
    owners = [0] * len(costs)
    for at in sorted(range(len(costs)), key=lambda at: -costs[at]):
        load, rank = heapq.heappop(loads)
        owners[at] = rank
        heapq.heappush(loads, (load + costs[at], rank))
    return owners


class ToOwners:
    """Moves some tensors to their owners, and back, for one rank of their mesh.

    Args:
        mesh: of all the tensors; this rank is in it.
        layouts: of the tensors, without partial values.
        owners: of each the position in the mesh, counted along its last axis first.
    """

    __slots__ = ("_comm", "_layouts", "_mesh", "_mine", "gives", "owned", "owners", "takes")

    def __init__(
        self, mesh: BoundMesh, layouts: Sequence[Layout], owners: Sequence[int]
    ) -> None:
        assert mesh.here is not None
        self._mesh, self._layouts, self.owners = mesh, tuple(layouts), tuple(owners)
        self._comm = mesh.everyone()
        me, places = self._comm.index, _places(mesh)
        self.owned = [at for at, owner in enumerate(owners) if owner == me]
        self._mine = {at: layouts[at].box_at(mesh.here) for at in range(len(layouts))}
        self.gives: list[list[int]] = [[] for _ in places]  # by owner: whose block this rank sends
        for at, (layout, owner) in enumerate(zip(layouts, owners)):
            if _sender(layout, mesh.here, places[owner]) == mesh.here:
                self.gives[owner].append(at)
        self.takes = [  # by sender: whose block this owner gets
            [at for at in self.owned
             if _sender(layouts[at], place, places[me]) == place]
            for place in places
        ]

    def gather(self, locals_: Sequence[Tensor], strides: Sequence[Sequence[int]]) -> list[Tensor]:
        """The whole tensors that this rank owns, in the order of `owned`, in memory of their own
        with these strides (one for each tensor). All have one dtype."""
        like = locals_[0]
        whole = {
            at: torch.empty_strided(
                self._layouts[at].shape, tuple(strides[at]), dtype=like.dtype, device=like.device)
            for at in self.owned
        }
        places = _places(self._mesh)
        boxes = [[(at, self._layouts[at].box_at(place)) for at in ats]
                 for place, ats in zip(places, self.takes)]
        got = self._exchange(
            [[locals_[at] for at in ats] for ats in self.gives],
            [[shape_of(box) for _, box in some] for some in boxes], like)
        for some, blocks in zip(boxes, got):
            for (at, box), block in zip(some, blocks):
                whole[at][slices(box)] = block
        return [whole[at] for at in self.owned]

    def spread(self, whole: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """This rank's blocks of all tensors, of which the owners have the `whole` ones; `like` has
        their dtype and device."""
        made = dict(zip(self.owned, whole))
        send = [[made[at][slices(self._layouts[at].box_at(place))] for at in self.owned]
                for place in _places(self._mesh)]
        theirs: list[list[int]] = [[] for _ in self.gives]
        for at, owner in enumerate(self.owners):
            theirs[owner].append(at)
        got = self._exchange(
            send, [[shape_of(self._mine[at]) for at in ats] for ats in theirs], like)
        found = {at: block for ats, blocks in zip(theirs, got) for at, block in zip(ats, blocks)}
        return [found[at] for at in range(len(self._layouts))]

    def _exchange(
        self, send: Sequence[Sequence[Tensor]], recv: Sequence[Sequence[tuple[int, ...]]],
        like: Tensor,
    ) -> list[list[Tensor]]:
        """One all-to-all of blocks, by rank; those received have the shapes `recv`."""
        comm, me = self._comm, self._comm.index
        kept, others = list(send[me]), [[] if at == me else one for at, one in enumerate(send)]
        counts = [sum(block.numel() for block in some) for some in others]
        sizes = [[math.prod(shape) for shape in some] for some in recv]
        due = [0 if at == me else sum(some) for at, some in enumerate(sizes)]
        blocks = [block.reshape(-1) for some in others for block in some]
        flat = torch.cat(blocks) if blocks else like.new_empty(0)
        if comm.size > 1:
            axes = tuple(map(str, comm.axes))
            traffic.emit(_TEXT, axes, "all_to_all", sum(due) * like.element_size())
            with traffic.moving(_TEXT), _DisableAutocast():
                flat = comm.all_to_all(flat, counts, due)
        out: list[list[Tensor]] = []
        for at, (some, part) in enumerate(zip(recv, flat.split(due))):
            pieces = kept if at == me else part.split(sizes[at])
            out.append([piece.reshape(shape) for piece, shape in zip(pieces, some)])
        return out


_TEXT = "whole tensors at their owners"


def _places(mesh: BoundMesh) -> list[Coordinate]:
    return list(itertools.product(*map(range, mesh.axis_sizes)))


def _sender(layout: Layout, place: Coordinate, owner: Coordinate) -> Coordinate:
    """The rank that sends the block of `place` to the owner: the replica that differs least from
    it."""
    return tuple([
        mine if layout.on(axis) is not None else theirs
        for axis, (mine, theirs) in enumerate(zip(place, owner))
    ])
