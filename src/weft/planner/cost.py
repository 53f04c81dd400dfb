"""What a step costs: bytes, seconds, memory. Only facts that are the same on all ranks.

Bytes are those that a rank receives from others. An all-reduce of n bytes over g ranks is
counted as a reduce-scatter and an all-gather, 2n(1 - 1/g), whatever the backend does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import assert_never

from weft.core.layout import Layout
from weft.planner.geometry import (
    Coordinate,
    intersect,
    num_copies,
    size_over,
    strip,
    volume,
)
from weft.planner.holders import Side
from weft.planner.steps import (
    AllGather,
    AllReduce,
    Exchange,
    ReduceScatter,
    Slice,
    Step,
    Term,
    Transfer,
)

__all__ = [
    "DEFAULT_LINK", "Link", "is_local", "missing_across", "missing_elements", "peak_elements",
    "step_nbytes", "step_nbytes_at", "step_seconds",
]


@dataclass(frozen=True, slots=True)
class Link:
    """One mesh axis as a network: seconds to start a collective, seconds per byte received."""

    latency_s: float
    seconds_per_byte: float


DEFAULT_LINK = Link(latency_s=50e-6, seconds_per_byte=1e-9)
"""gloo between processes of one machine, to the order of magnitude."""


def is_local(step: Step) -> bool:
    """Whether a step sends nothing."""
    if isinstance(step, Transfer):
        return missing_across(step.src, step.dst) == 0
    return isinstance(step, (Slice, Term))


def step_nbytes_at(step: Step, coordinate: Coordinate, itemsize: int) -> int:
    """Bytes that one coordinate (of the target's mesh) receives from others."""
    if isinstance(step, Transfer):
        mesh = step.dst.mesh
        rank = mesh.rank_at(mesh.position(coordinate))
        blocks = step.receives(rank)
        return itemsize * sum(volume(box) for holder, box in blocks if holder != rank)
    own = step.dst.box_at(coordinate)
    members = size_over(step.src, step.axes)
    match step:
        case Slice() | Term():
            return 0
        case Exchange() | AllGather():
            blocks = step.receives(coordinate)
            return itemsize * sum(volume(box) for peer, box in blocks if peer != coordinate)
        case ReduceScatter():
            return itemsize * volume(own) * (members - 1)
        case AllReduce():
            return _all_reduce_nbytes(itemsize * volume(own), members)
        case _:
            assert_never(step)


def step_nbytes(step: Step, itemsize: int) -> int:
    """Bytes received by all ranks together; cost does not grow with axes that stay out of it."""
    members = size_over(step.src, step.axes)
    numel = math.prod(step.src.shape)
    match step:
        case Slice() | Term():
            return 0
        case Exchange():
            return itemsize * missing_elements(step.src, step.dst)
        case Transfer():
            return itemsize * missing_across(step.src, step.dst)
        case AllGather():
            return itemsize * numel * (num_copies(step.dst) - num_copies(step.src))
        case ReduceScatter():
            return itemsize * numel * num_copies(step.dst) * (members - 1)
        case AllReduce():
            return _all_reduce_nbytes(itemsize * numel * num_copies(step.dst), members)
        case _:
            assert_never(step)


def _all_reduce_nbytes(nbytes: int, members: int) -> int:
    return -(-2 * nbytes * (members - 1) // members)


def step_seconds(step: Step, itemsize: int, links: tuple[Link, ...] | None = None) -> float:
    """Seconds that a step takes: the latency of its slowest axis and its mean bytes per rank."""
    if is_local(step):
        return 0.0
    if isinstance(step, Transfer):
        nbytes = step_nbytes(step, itemsize) / min(step.src.mesh.size(), step.dst.mesh.size())
        return DEFAULT_LINK.latency_s + nbytes * DEFAULT_LINK.seconds_per_byte
    over = [links[axis] if links else DEFAULT_LINK for axis in step.axes]
    nbytes = step_nbytes(step, itemsize) / step.src.mesh.size()
    return max(link.latency_s for link in over) + nbytes * max(
        link.seconds_per_byte for link in over
    )


def peak_elements(src: Layout, steps: tuple[Step, ...]) -> int:
    """At most this many elements does a rank hold at once: both sides of a step."""
    sizes = [_largest(step.src) + _largest(step.dst) for step in steps]
    return max(sizes, default=_largest(src))


def _largest(layout: Layout) -> int:
    return math.prod([max(layout.sizes_of(dim)) for dim in range(layout.ndim)])


@lru_cache(maxsize=4096)
def missing_elements(src: Layout, dst: Layout) -> int:
    """Elements of their target boxes that the ranks do not hold, summed over the mesh."""
    src, dst = strip(src), strip(dst)
    numel = math.prod(src.shape)
    held, used = 1, 1
    for axes, dims in _components(src, dst):
        held *= _overlap(src, dst, axes, dims)
        used *= size_over(src, axes)
    return numel * num_copies(dst) - held * (src.mesh.size() // used)


def missing_across(src: Layout, dst: Layout) -> int:
    """Elements of their target boxes that the devices of the target's mesh do not hold.

    The cost grows with the devices that are in both meshes.
    """
    return math.prod(src.shape) * num_copies(dst) - _kept_across(src, dst)


@lru_cache(maxsize=1024)
def _kept_across(src: Layout, dst: Layout) -> int:
    here, there = Side(src), Side(dst)
    (a, b), (c, d) = src.mesh.rank_span, dst.mesh.rank_span
    small = src.mesh if src.mesh.size() <= dst.mesh.size() else dst.mesh
    ranks = [] if b <= c or d <= a else map(small.rank_at, range(small.size()))
    total = 0
    for rank in ranks:
        at, to = here.at(rank), there.at(rank)
        if at is None or to is None or here.term(at) != there.term(to):
            continue
        total += volume(intersect(src.box_at(at), dst.box_at(to)) or ((0, 0),))
    return total


def _components(src: Layout, dst: Layout) -> list[tuple[set[int], set[int]]]:
    """Tensor dims that share no axis with others vary apart: (axes, dims) of each family."""
    families: list[tuple[set[int], set[int]]] = []
    for dim in range(src.ndim):
        axes, dims = {*src.dims[dim], *dst.dims[dim]}, {dim}
        for family in [family for family in families if family[0] & axes]:
            families.remove(family)
            axes, dims = axes | family[0], dims | family[1]
        families.append((axes, dims))
    return families


def _overlap(src: Layout, dst: Layout, axes: set[int], dims: set[int]) -> int:
    """Elements that are in both boxes, in `dims` only, summed over the digits of `axes`."""
    order = sorted(axes)
    coordinate = [0] * src.mesh.ndim
    total = 0
    for digits in product(*(range(src.mesh.axis_sizes[axis]) for axis in order)):
        for axis, digit in zip(order, digits):
            coordinate[axis] = digit
        shared = 1
        for dim in dims:
            a, b = src.interval(dim, src.shard_index(dim, coordinate))
            c, d = dst.interval(dim, dst.shard_index(dim, coordinate))
            shared *= max(0, min(b, d) - max(a, c))
        total += shared
    return total
