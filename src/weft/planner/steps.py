"""The steps that plans are made of: a closed union of values, each layout -> layout.

| step | what it does | over `axes` |
|---|---|---|
| Slice | keeps the part that the target holds | nothing is sent |
| Exchange | box intersections, by one all-to-all | axes that hold what is missing |
| AllGather | every member of the group gets the same box | axes that stop sharding |
| ReduceScatter | reduces partial values, each member its box | partial axes that come to shard |
| AllReduce | reduces partial values, each member all of it | partial axes that become replicated |
| Transfer | box intersections, from one mesh to another | no axes: device ids say who sends |
| Fetch | shards -> boxes that ranks read (halos), which overlap | axes that shard what is read |
| Fold | boxes of partial values -> shards: what overlaps is summed | as Fetch |
| MakePartial | one rank keeps the value, the others hold zeros | axes that become partial |

Layouts have the kinds of reduction. Axes that are partial on both sides are not touched: partial
values move as values do. Fetch and Fold are each other's transpose. `sends` and `receives` name
what one coordinate exchanges, without listing the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from weft.core.cover import Cover
from weft.core.layout import Box, Layout
from weft.planner.geometry import Coordinate, digits_of, meets
from weft.planner.holders import crossing
from weft.planner.links import NODE_SIZE

__all__ = [
    "AllGather", "AllReduce", "Block", "Exchange", "Fetch", "Fold", "ReduceScatter", "Slice",
    "Step", "MakePartial", "Transfer",
]

Block = tuple[Coordinate, Box]
"""The other side's coordinate (one's own included) and a box of global indices."""


_NOTHING = Cover(())


@dataclass(frozen=True, slots=True)
class _Step:
    """A change of layout; `axes` are the mesh axes over which it acts, ascending."""

    src: Layout
    dst: Layout
    axes: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple([str(self.src.mesh.axis_names[axis]) for axis in self.axes])

    @property
    def over(self) -> str:
        """The axes, for texts: ` over dp,tp`."""
        return f" over {','.join(self.names)}" if self.axes else ""

    def __str__(self) -> str:
        return f"{type(self).__name__}{self.over}: {self.src} -> {self.dst}"


class Slice(_Step):
    """Local: the target box lies in the held box."""

    __slots__ = ()


class Exchange(_Step):
    """Each element that a rank lacks comes from the one holder that differs only in `axes`."""

    __slots__ = ()

    def receives(self, coordinate: Coordinate) -> list[Block]:
        """The parts of the target box at `coordinate`: holder and box, in group order."""
        wanted = self.dst.box_at(coordinate)
        return _blocks(self.src, [
            meets(self.src, dim, interval) for dim, interval in enumerate(wanted)
        ], [coordinate])

    def sends(self, coordinate: Coordinate) -> list[Block]:
        """The parts of the box at `coordinate` that others want: taker and box, in group order."""
        held = self.src.box_at(coordinate)
        cut = self.src.sharded_axes
        # A taker agrees with this coordinate on every axis that does not shard the source: this is
        # its nearest holder.
        fixed = {axis: digit for axis, digit in enumerate(coordinate) if axis not in cut}
        named = self.dst.sharded_axes
        takers = self.src.mesh.along([axis for axis in self.axes if axis not in named], coordinate)
        return _blocks(self.dst, [
            meets(self.dst, dim, interval, fixed) for dim, interval in enumerate(held)
        ], takers)


@dataclass(frozen=True, slots=True)
class _Halo(_Step):
    """Between shards and boxes that `cover` says, which overlap.

    Each rank holds a shard on one side and a box on the other. The same axes shard both; their dims
    and cuts may differ. Blocks are named by their places in the box: on a ring, these may lie
    outside of the tensor.
    """

    cover: Cover = _NOTHING
    adds: ClassVar[bool]
    """Whether boxes are summed to shards, or else made of them."""

    @property
    def shards(self) -> Layout:
        return self.dst if self.adds else self.src

    @property
    def boxes(self) -> Layout:
        """The layout beside which `cover` says what ranks read."""
        return self.src if self.adds else self.dst

    def receives(self, coordinate: Coordinate) -> list[Block]:
        """What makes up the box, filled places aside, or the parts of the shard that others hold:
        holder and box, in group order."""
        return self._read(coordinate) if self.adds else self._owned(coordinate)

    def sends(self, coordinate: Coordinate) -> list[Block]:
        """What others read of the shard, or own of the box: taker and box, in group order."""
        return self._owned(coordinate) if self.adds else self._read(coordinate)

    def _owned(self, coordinate: Coordinate) -> list[Block]:
        """Who owns the parts of the box, among those that differ in axes that shard alone."""
        box = self.cover.box_at(self.boxes, coordinate)
        return _blocks(self.shards, [
            [(index, start + turn, stop + turn)
             for part, turn in self.cover.pieces(self.shards, dim, interval)
             for index, start, stop in meets(self.shards, dim, part)]
            for dim, interval in enumerate(box)
        ], [coordinate])

    def _read(self, coordinate: Coordinate) -> list[Block]:
        """Who reads parts of the shard, among those that differ in axes that shard alone."""
        found: list[list[tuple[int, int, int]]] = []
        for dim, (start, stop) in enumerate(self.shards.box_at(coordinate)):
            reads = self.cover.reads[dim]
            if reads is None:
                found.append(meets(self.boxes, dim, (start, stop)))
                continue
            parts: list[tuple[int, int, int]] = []
            for index, read in enumerate(reads):
                for part, turn in self.cover.pieces(self.boxes, dim, read):
                    first, last = max(part[0], start), min(part[1], stop)
                    if first < last:
                        parts.append((index, first + turn, last + turn))
            found.append(parts)
        return _blocks(self.boxes, found, [coordinate])

    def __str__(self) -> str:
        """`Halo over x: dim 2 by 1 and 1 of f32[...]`: the most that a shard reads around it."""
        wide = [f"dim {dim} by {before} and {behind}" for dim, mine in enumerate(self.cover.reads)
                if mine is not None for before, behind in (self.cover.widths(self.boxes, dim),)]
        how = "by the cuts of" if self.shards.dims == self.boxes.dims else "to shards of"
        same = self.shards == self.boxes
        of = str(self.shards) if same else f"{self.shards}, {how} {self.boxes}"
        word = "Sum of halos" if self.adds else "Halo"
        return f"{word}{self.over}: {', '.join(wide)}, of {of}"


class Fetch(_Halo):
    """Each rank gets the box that `cover` says beside `dst`, filled where it sticks out."""

    __slots__ = ()
    adds = False


class Fold(_Halo):
    """What ranks hold of the boxes that `cover` says beside `src` is summed by the owners of `dst`.

    What sticks out of the tensor is dropped, and what nobody reads is 0.
    """

    __slots__ = ()
    adds = True


class AllGather(_Step):
    """Axes stop sharding: the boxes of a group, in any dims, together are the target box."""

    __slots__ = ()

    def receives(self, coordinate: Coordinate) -> list[Block]:
        """The members of the group and what they hold, in group order."""
        peers = self.src.mesh.along(self.axes, coordinate)
        return [(peer, self.src.box_at(peer)) for peer in peers]


class ReduceScatter(_Step):
    """Partial values over `axes` are reduced; each member of the group keeps its target box."""

    __slots__ = ()

    def sends(self, coordinate: Coordinate) -> list[Block]:
        """The members of the group and the box that each gets, in group order."""
        peers = self.dst.mesh.along(self.axes, coordinate)
        return [(peer, self.dst.box_at(peer)) for peer in peers]


class AllReduce(_Step):
    """Partial values over `axes` are reduced; every member of the group keeps the whole."""

    __slots__ = ()


class MakePartial(_Step):
    """Local: sharding or replicated axes become partial.

    A sharding axis leaves zeros around its box (sum). A replicated axis keeps the value on
    coordinate 0 and the identity elsewhere (sum, product), or keeps it everywhere (kinds for which
    reducing a value twice does no harm).
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Transfer(_Step):
    """From a layout on one mesh to a layout on another: every device gets its new box.

    The meshes may differ in axes, sizes, names and the order of their device ids, and may overlap
    or not. `axes` is empty. Devices are identified by *device id* (`rank`), because a
    device has another coordinate, or none, on the other mesh:

    - A device of `src.mesh` holds `src.box(rank)` before the step, a device of `dst.mesh` holds
      `dst.box(rank)` after it. A device of `src.mesh` alone is left with the empty local part of a
      rank outside. A device of neither mesh takes no part.
    - `receives(rank)`: [(holder, box), ...], ascending by holder. The boxes (global indices) are
      disjoint and nonempty, and together they are `dst.box(rank)`; each lies in `src.box(holder)`.
      A holder gives at most one box. The device itself is among the holders if it keeps
      a part. [] for a device that is not in `dst.mesh`, or whose target box is empty.
    - `sends(rank)`: [(taker, box), ...], ascending by taker, including the device itself if it
      keeps a part. [] for a device that is not in `src.mesh`, or from which nothing is wanted.
    - Both agree: `(taker, box) in sends(holder)` if and only if `(holder, box) in receives(taker)`.
      Each lists what one device exchanges without listing the meshes.

    Partial axes must be partial on both sides, with the same names, sizes and kinds: partial values
    move as values do, from the holders of a partial value to the devices of the same one. All other
    reductions are done before, on `src.mesh`, or made after, on `dst.mesh`.

    The copy that serves a device is itself, else one on its node (device ids that are equal after
    division by `node_size`), else any; balanced within each class (`weft.planner.holders`).
    """

    node_size: int = NODE_SIZE

    def receives(self, rank: int) -> list[tuple[int, Box]]:
        """The parts of the target box of a device: holder and box, ascending."""
        return crossing(self.src, self.dst, self.node_size).receives(rank)

    def sends(self, rank: int) -> list[tuple[int, Box]]:
        """The parts of the source box of a device that others want: taker and box, ascending."""
        return crossing(self.src, self.dst, self.node_size).sends(rank)

    def holds(self, rank: int) -> Box | None:
        """What a device already holds of its target, of the same partial value; None if nothing."""
        return crossing(self.src, self.dst, self.node_size).holds(rank)

    def __str__(self) -> str:
        return f"Transfer from {self.src.mesh} to {self.dst.mesh}: {self.src} -> {self.dst}"


Step = (
    Slice | Exchange | Fetch | Fold | AllGather | ReduceScatter | AllReduce | Transfer | MakePartial
)


def _blocks(
    layout: Layout, found: list[list[tuple[int, int, int]]], others: list[Coordinate]
) -> list[Block]:
    """(coordinate, box) for each choice of a shard per dim, on the other axes as in `others`."""
    mesh = layout.mesh
    choices = [
        [(digits_of(mesh, axes, index), (start, stop)) for index, start, stop in meeting]
        for axes, meeting in zip(layout.dims, found)
    ]
    out: list[Block] = []
    for choice in product(*choices):
        box = tuple([interval for _, interval in choice])
        for other in others:
            at = list(other)
            for digits, _ in choice:
                for axis, digit in digits:
                    at[axis] = digit
            out.append((tuple(at), box))
    return sorted(out)
