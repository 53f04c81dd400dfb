"""The cost of a step: bytes, seconds, memory. It uses only facts that are the same on all ranks.

Bytes are those that a rank receives from others. An all-reduce of n bytes over g ranks is
counted as a reduce-scatter and an all-gather, 2n(1 - 1/g), whatever the backend does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import assert_never

from weft.core.cover import Cover, Interval
from weft.core.layout import Box, Layout
from weft.planner.geometry import (
    Coordinate,
    intersect,
    largest,
    num_copies,
    size_over,
    volume,
)
from weft.planner.links import Links, as_links
from weft.planner.overlap import missing_elements
from weft.planner.steps import (
    AllGather,
    AllReduce,
    Exchange,
    Fetch,
    Fold,
    MakePartial,
    ReduceScatter,
    Slice,
    Step,
    Transfer,
)

__all__ = [
    "cheapest", "halo_elements", "is_local", "nbytes_of", "peak_elements", "seconds_of",
    "step_nbytes", "step_nbytes_at", "step_seconds",
]


def is_local(step: Step) -> bool:
    """Whether a step sends nothing."""
    if isinstance(step, (Transfer, Fetch, Fold)):
        return step_nbytes(step, 1) == 0
    return isinstance(step, (Slice, MakePartial))


def step_nbytes_at(step: Step, coordinate: Coordinate, itemsize: int) -> int:
    """Bytes that one coordinate (of the target's mesh) receives from others."""
    own = step.dst.box_at(coordinate)
    match step:
        case Slice() | MakePartial():
            return 0
        case Fetch() | Fold():
            parts = [box for other, box in step.receives(coordinate) if other != coordinate]
            return itemsize * sum(map(volume, parts))
        case Exchange() | AllGather():
            return itemsize * _lacking(step.src.box_at(coordinate), own)
        case Transfer():
            mesh = step.dst.mesh
            rank = mesh.rank_at(mesh.position(coordinate))
            return itemsize * _lacking(step.holds(rank), own)
        case ReduceScatter():
            return itemsize * volume(own) * (size_over(step.src, step.axes) - 1)
        case AllReduce():
            return _all_reduce_nbytes(itemsize * volume(own), size_over(step.src, step.axes))
        case _:
            assert_never(step)


def _lacking(held: Box | None, wanted: Box) -> int:
    both = None if held is None else intersect(held, wanted)
    return volume(wanted) - (0 if both is None else volume(both))


def step_nbytes(step: Step, itemsize: int) -> int:
    """Bytes received by all ranks together. Its run time does not grow with uninvolved axes."""
    numel = math.prod(step.src.shape)
    match step:
        case Slice() | MakePartial():
            return 0
        case Exchange() | Transfer():
            return itemsize * missing_elements(step.src, step.dst)
        case Fetch() | Fold():
            return itemsize * halo_elements(step.shards, step.boxes, step.cover)
        case AllGather():
            return itemsize * numel * (num_copies(step.dst) - num_copies(step.src))
        case ReduceScatter():
            members = size_over(step.src, step.axes)
            return itemsize * numel * num_copies(step.dst) * (members - 1)
        case AllReduce():
            members = size_over(step.src, step.axes)
            return _all_reduce_nbytes(itemsize * numel * num_copies(step.dst), members)
        case _:
            assert_never(step)


@lru_cache(maxsize=4096)
def halo_elements(shards: Layout, boxes: Layout, cover: Cover) -> int:
    """Elements that ranks read and do not own, summed over all ranks: dim by dim, where the same
    axes shard each."""
    if shards.dims == boxes.dims:
        lacking = _not_owned(boxes, cover, [
            [(cover.interval(boxes, dim, index), shards.interval(dim, index))
             for index in range(boxes.num_shards(dim))]
            for dim in range(boxes.ndim)
        ])
    else:
        ranks = boxes.mesh.along(boxes.sharded_axes, (0,) * boxes.mesh.ndim)
        lacking = sum([
            _not_owned(boxes, cover, [
                [both] for both in zip(cover.box_at(boxes, at), shards.box_at(at))
            ]) for at in ranks
        ])
    return num_copies(boxes) * lacking


def _not_owned(
    boxes: Layout, cover: Cover, dims: Sequence[Sequence[tuple[Interval, Interval]]]
) -> int:
    """Elements in the products of intervals that are read, but not in those that are owned; `dims`
    are the pairs of both."""
    read = kept = 1
    for dim, pairs in enumerate(dims):
        parts = [(part, own) for it, own in pairs for part, _ in cover.pieces(boxes, dim, it)]
        read *= sum(stop - start for (start, stop), _ in parts)
        kept *= sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in parts)
    return read - kept


def _all_reduce_nbytes(nbytes: int, members: int) -> int:
    return -(-2 * nbytes * (members - 1) // members)


def nbytes_of(steps: Sequence[Step], itemsize: int) -> int:
    """Bytes received by all ranks together, over several steps."""
    return sum(step_nbytes(step, itemsize) for step in steps)


def step_seconds(step: Step, itemsize: int, links: Links | None = None) -> float:
    """Seconds that a step takes, over the given or the default links.

    For a transfer, the mean over the receivers or the mean over the senders, whichever is larger.
    """
    if is_local(step):
        return 0.0
    links = as_links(links, "step_seconds(links)")
    nbytes, src, dst = step_nbytes(step, itemsize), step.src.mesh, step.dst.mesh
    if isinstance(step, Transfer):
        return links.seconds_between(src, dst, nbytes / min(src.size(), dst.size()))
    passes = 2 if isinstance(step, AllReduce) else 1
    return links.seconds_over(src, step.axes, nbytes / src.size(), passes)


def seconds_of(steps: Sequence[Step], itemsize: int, links: Links | None = None) -> float:
    """Seconds that several steps take, one after the other."""
    return sum(step_seconds(step, itemsize, links) for step in steps)


def cheapest(family: Sequence[tuple[Step, ...]], itemsize: int, links: Links) -> tuple[Step, ...]:
    """The member that takes the least time, then the fewest bytes, then the fewest steps."""
    if len(family) == 1:
        return family[0]
    best, least = family[0], (math.inf, 0, 0)
    for steps in family:
        seconds, nbytes = 0.0, 0
        for step in steps:
            if seconds > least[0]:
                break
            seconds += step_seconds(step, itemsize, links)
            nbytes += step_nbytes(step, itemsize)
        if (seconds, nbytes, len(steps)) < least:
            best, least = steps, (seconds, nbytes, len(steps))
    return best


def peak_elements(src: Layout, steps: Sequence[Step]) -> int:
    """The most elements that a rank holds at once: both sides of a step."""
    return max(map(_both_sides, steps), default=largest(src))


def _both_sides(step: Step) -> int:
    """Elements of the largest boxes before and after a step."""
    if isinstance(step, (Fetch, Fold)):
        return largest(step.shards) + step.cover.largest(step.boxes)
    return largest(step.src) + largest(step.dst)
