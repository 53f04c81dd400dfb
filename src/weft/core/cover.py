"""Covering boxes: what ranks read of a tensor beyond the shards that they own (halos).

Each element has one owner, so overlap is no part of a layout. Beside a layout, a `Cover` gives the
interval that each shard of each dim reads; a rank's box is the product of its intervals. Intervals
may overlap, leave elements out, and stick out of the tensor. There the box is filled, or, in a dim
that is a ring, goes on at the other end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.layout import Box, Layout

__all__ = ["Cover", "Interval", "Reads", "clipped"]

Interval = tuple[int, int]

Reads = tuple[tuple[Interval, ...] | None, ...]
"""Per dim: None (as sharded), or per shard of that dim the interval that it reads."""


@dataclass(frozen=True, slots=True)
class Cover:
    """What the ranks of a layout read.

    Args:
        reads: per dim and shard, the interval.
        fill: what stands where a box sticks out of the tensor. Infinite values are the extremes of
            integers.
        rings: the dims whose first place follows the last one.
    """

    reads: Reads
    fill: float = 0.0
    rings: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, layout: Layout, reads: Reads, fill: float = 0.0, rings: tuple[int, ...] = ()
    ) -> Cover | None:
        """The cover of a layout with these reads; None where each rank reads what it owns."""
        kept = tuple([
            None if mine is None or all(
                mine[index] == layout.interval(dim, index) for index in range(len(mine))
            ) else mine
            for dim, mine in enumerate(reads)
        ])
        rings = tuple([dim for dim in rings if kept[dim] is not None])
        return cls(kept, fill, rings) if any(mine is not None for mine in kept) else None

    def interval(self, layout: Layout, dim: int, index: int) -> Interval:
        """What shard `index` of a dim reads."""
        mine = self.reads[dim]
        return layout.interval(dim, index) if mine is None else mine[index]

    def box_at(self, layout: Layout, coordinate: Sequence[int]) -> Box:
        """What the rank at a coordinate reads; it may stick out of the tensor."""
        own = layout.box_at(coordinate)
        return tuple([
            held if mine is None else mine[layout.shard_index(dim, coordinate)]
            for dim, (held, mine) in enumerate(zip(own, self.reads))
        ])

    def inside_at(self, layout: Layout, coordinate: Sequence[int]) -> Box:
        """What the rank at a coordinate reads of the tensor itself."""
        return tuple([
            interval if dim in self.rings else clipped(interval, layout.shape[dim])
            for dim, interval in enumerate(self.box_at(layout, coordinate))
        ])

    def pieces(self, layout: Layout, dim: int, interval: Interval) -> list[tuple[Interval, int]]:
        """The parts of an interval that lie in the tensor, in places of the dim. With each comes
        what to add for its place in the interval: 0, or on a ring a multiple of the length."""
        length = layout.shape[dim]
        if dim not in self.rings:
            return [(clipped(interval, length), 0)]
        rounds = range(interval[0] // length, -(-interval[1] // length)) if length else ()
        return [
            ((max(interval[0] - turn * length, 0), min(interval[1] - turn * length, length)),
             turn * length)
            for turn in rounds
        ]

    def largest(self, layout: Layout) -> int:
        """Elements of the largest box."""
        return math.prod([
            max([stop - start for start, stop in (
                self.reads[dim] or [layout.interval(dim, at) for at in range(
                    layout.num_shards(dim))]
            )], default=0)
            for dim in range(layout.ndim)
        ])

    def widths(self, layout: Layout, dim: int) -> tuple[int, int]:
        """The most that a shard reads in front of what it owns, and behind it."""
        pairs = [
            (self.interval(layout, dim, at), layout.interval(dim, at))
            for at in range(layout.num_shards(dim))
        ]
        wide = [(own[0] - read[0], read[1] - own[1]) for read, own in pairs if read[0] < read[1]]
        return tuple([max(0, *(each[side] for each in wide)) for side in (0, 1)])  # type: ignore


def clipped(interval: Interval, length: int) -> Interval:
    """The part of an interval that lies in 0..length."""
    start = min(max(interval[0], 0), length)
    return start, max(min(interval[1], length), start)
