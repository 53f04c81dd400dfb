"""The relation of two layouts of one global shape, dim by dim.

Everything here is arithmetic on cuts: which leading axes two layouts share, and the cuts of a dim
when only its leading axes count (*coarser*) or when more axes shard its pieces (*finer*).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from weft.core.cuts import finer_cuts
from weft.core.layout import Box, Layout
from weft.core.mesh import Mesh

__all__ = [
    "Coordinate", "between", "coarser", "common_depth", "digits_of", "finer", "intersect",
    "largest", "longest", "meets", "num_copies", "size_over", "strip", "volume",
]

Coordinate = tuple[int, ...]
"""A position on a mesh: one digit per axis."""

Cut = tuple[tuple[int, ...], tuple[int, ...] | None]
"""The axes of one dim and its cuts (None: default)."""


def size_over(layout: Layout, axes: Iterable[int]) -> int:
    """Number of devices along some axes of the layout's mesh."""
    sizes = layout.mesh.axis_sizes
    return math.prod([sizes[axis] for axis in axes])


@lru_cache(maxsize=4096)
def strip(layout: Layout) -> Layout:
    """The layout without its axes of size 1, which shard nothing and reduce nothing."""
    sizes = layout.mesh.axis_sizes
    if 1 not in sizes:
        return layout
    dims = [tuple(axis for axis in axes if sizes[axis] > 1) for axes in layout.dims]
    partial = [kind if size > 1 else None for kind, size in zip(layout.partial, sizes)]
    return Layout.make(layout.mesh, layout.shape, dims, layout.cuts, partial)


def common_depth(src: Layout, dst: Layout, dim: int) -> int:
    """How many leading axes shard a dim alike in both layouts."""
    left, right = src.dims[dim], dst.dims[dim]
    depth = 0
    while depth < min(len(left), len(right)) and left[depth] == right[depth]:
        depth += 1
    if src.cuts[dim] is not None or dst.cuts[dim] is not None:
        while depth and _cuts_at(src, dim, depth) != _cuts_at(dst, dim, depth):
            depth -= 1
    return depth


def _cuts_at(layout: Layout, dim: int, depth: int) -> tuple[int, ...]:
    return layout.cuts_of(dim)[:: size_over(layout, layout.dims[dim][depth:])]


def coarser(layout: Layout, dim: int, depth: int) -> Cut:
    """The axes and cuts of a dim when only its first `depth` axes count."""
    axes = layout.dims[dim][:depth]
    return axes, None if layout.cuts[dim] is None else _cuts_at(layout, dim, depth)


def finer(layout: Layout, cut: Cut, more: tuple[int, ...]) -> Cut:
    """A dim's axes and cuts with `more` axes below them, each piece cut by default."""
    axes, cuts = cut
    if more and cuts is not None:
        cuts = finer_cuts(cuts, [layout.mesh.axis_sizes[axis] for axis in more])
    return axes + more, cuts


def intersect(left: Box, right: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    out: list[tuple[int, int]] = []
    for (a, b), (c, d) in zip(left, right):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        out.append((start, stop))
    return tuple(out)


def volume(box: Box) -> int:
    """Number of elements of a box."""
    return math.prod([stop - start for start, stop in box])


def longest(box: Box) -> tuple[int, int]:
    """The dim in which a box is longest, and its length there; (0, 1) of a box without dims."""
    lengths = [stop - start for start, stop in box]
    dim = max(range(len(box)), key=lengths.__getitem__, default=0)
    return dim, lengths[dim] if box else 1


def between(box: Box, dim: int, start: int, stop: int) -> Box:
    """The part of a box from one place of a dim to another, counted from where it begins."""
    low = box[dim][0]
    return (*box[:dim], (low + start, low + stop), *box[dim + 1 :])


def meets(
    layout: Layout, dim: int, interval: tuple[int, int], fixed: Mapping[int, int] | None = None
) -> list[tuple[int, int, int]]:
    """The shards of a dim that overlap an interval, as (index, start, stop of the overlap).

    For axes in `fixed`, only with the given digit. The run time grows with the shards found and the
    axes of the dim, not with its shards.
    """
    start, stop = interval
    axes = layout.dims[dim]
    levels = [(layout.mesh.axis_sizes[axis], fixed.get(axis) if fixed else None) for axis in axes]
    if start >= stop:
        return []
    cuts = layout.cuts[dim]
    if cuts is None:
        return _default_meets(levels, layout.shape[dim], start, stop)
    found: list[tuple[int, int, int]] = []
    index = bisect_right(cuts, start) - 1
    while index + 1 < len(cuts) and cuts[index] < stop:
        if cuts[index] < cuts[index + 1] and (not fixed or all(
            fixed.get(axis, digit) == digit
            for axis, digit in digits_of(layout.mesh, axes, index)
        )):
            found.append((index, max(start, cuts[index]), min(stop, cuts[index + 1])))
        index += 1
    return found


def _default_meets(
    levels: Sequence[tuple[int, int | None]], length: int, start: int, stop: int
) -> list[tuple[int, int, int]]:
    """Like `meets`, for default cuts: descend into the overlapping pieces of each axis."""
    pieces = [(0, 0, length)]
    for size, fixed in levels:
        finer_pieces: list[tuple[int, int, int]] = []
        for index, low, high in pieces:
            chunk = -(-(high - low) // size)
            first, last = (max(start, low) - low) // chunk, (min(stop, high) - 1 - low) // chunk
            if fixed is not None:
                first, last = max(first, fixed), min(last, fixed)
            for digit in range(first, last + 1):
                begin = low + digit * chunk
                end = begin + chunk
                finer_pieces.append((index * size + digit, begin, end if end < high else high))
        pieces = finer_pieces
    return [(index, max(start, low), min(stop, high)) for index, low, high in pieces]


def digits_of(mesh: Mesh, axes: Sequence[int], index: int) -> list[tuple[int, int]]:
    """(axis, digit) pairs of position `index` among those along some axes, last axis fastest."""
    out: list[tuple[int, int]] = []
    for axis in reversed(axes):
        index, digit = divmod(index, mesh.axis_sizes[axis])
        out.append((axis, digit))
    return out


def largest(layout: Layout) -> int:
    """Elements of the largest box; the first of default pieces is always one of the largest."""
    layout = layout.apart
    first = layout.box_at((0,) * layout.mesh.ndim)
    return math.prod([
        max(layout.sizes_of(dim)) if layout.cuts[dim] else stop - start
        for dim, (start, stop) in enumerate(first)
    ])


def num_copies(layout: Layout) -> int:
    """How many devices hold each element: the product of the axes that do not shard."""
    return layout.mesh.size() // size_over(layout, (a for axes in layout.dims for a in axes))
