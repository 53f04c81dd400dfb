"""How much of their target boxes the devices hold already, summed over the meshes.

Theory of operation. The sum over all devices of |source box ∩ target box| is a product of sums:
over the dims, of overlaps of two intervals; an interval is where one descends in the *tree* of a
dim, level by level, by the device's digits. A digit that no tree has multiplies; one that stands
on the last level of one tree only is summed by leaving the level out (the pieces of a piece are
the piece). What is left is summed by descending in all trees at once, a digit at a time:

- *steady*: every tree that the digit is in cuts alike in both layouts, or cuts one that lies in
  the other's piece. Then only lengths matter, and those of default cuts are equal but for the last
  few: one descent for each run of equal lengths.
- *twins*: both trees of a dim cut the same piece alike, by different digits. Only where they are
  equal is there an overlap, so the two become one.
- else the digits are tried, those where the pieces still overlap.

So the cost grows with the axes, and in the last case with the pieces that overlap, but not with
the devices. Two meshes share digits where both have the same evenly spaced devices and their
sizes have a common refinement; else the devices that are in both are listed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.planner.geometry import intersect, num_copies, strip, volume
from weft.planner.holders import Side

__all__ = ["missing_elements", "shared_ranks"]


@lru_cache(maxsize=4096)
def missing_elements(src: Layout, dst: Layout) -> int:
    """Elements of their target boxes that the devices of the target's mesh do not hold.

    Where axes of terms stay, those of the device's own term. One mesh or two.
    """
    src, dst = strip(src), strip(dst)
    return math.prod(src.shape) * num_copies(dst) - _kept(src, dst)


def _kept(src: Layout, dst: Layout) -> int:
    if src.mesh == dst.mesh:
        sizes = src.mesh.axis_sizes
        return _sum(src, dst, [[axis] for axis in range(len(sizes))] * 2, sizes)
    if not (src.is_partial or dst.is_partial):
        refined = _refinement(src.mesh, dst.mesh)
        if refined is not None:
            return _sum(src, dst, *refined)
    here, there, total = Side(src), Side(dst), 0
    for rank in shared_ranks(src.mesh, dst.mesh):
        at, to = here.at(rank), there.at(rank)
        assert at is not None and to is not None
        if here.term(at) == there.term(to):
            both = intersect(src.box_at(at), dst.box_at(to))
            total += 0 if both is None else volume(both)
    return total


@lru_cache(maxsize=64)
def shared_ranks(left: Mesh, right: Mesh) -> Sequence[int]:
    """The device ids that are in both meshes."""
    small, large = (left, right) if left.size() <= right.size() else (right, left)
    (a, b), (c, d) = small.rank_span, large.rank_span
    if b <= c or d <= a:
        return ()
    one, two = left.rank_range, right.rank_range
    if one is not None and two is not None and one.step == two.step and (a - c) % one.step:
        return ()
    ids = map(small.rank_at, range(small.size()))
    return [rank for rank in ids if large.position_of_rank(rank) is not None]


def _refinement(left: Mesh, right: Mesh) -> tuple[list[list[int]], list[int]] | None:
    """The digits that both meshes' axes are made of: for each axis in turn, and their sizes."""
    if left.rank_range is None or left.rank_range != right.rank_range:
        return None
    strides = sorted({*left.axis_strides, *right.axis_strides, left.size(), 1}, reverse=True)
    if any(major % minor for major, minor in pairwise(strides)):
        return None
    digits = {minor: number for number, minor in enumerate(strides[1:])}
    parts = [
        [digits[s] for s in strides[1:] if stride <= s < stride * size]
        for mesh in (left, right) for stride, size in zip(mesh.axis_strides, mesh.axis_sizes)
    ]
    return parts, [major // minor for major, minor in pairwise(strides)]


class _Level(NamedTuple):
    """One step down a tree: `size` digits, each of them `unit` pieces of the `total` of an axis.

    `total` is 0 where a level above has begun to cut the same axis.
    """

    digit: int
    size: int
    unit: int
    total: int


class _Node(NamedTuple):
    """A piece of a dim in one layout, and how it is cut further.

    Explicit cuts are found at `index`; default ones by `chunk`, the length of the axis's pieces.
    """

    low: int
    high: int
    levels: tuple[_Level, ...]
    cuts: tuple[int, ...] | None = None
    index: int = 0
    chunk: int = 0

    def child(self, digit: int) -> _Node:
        (_, size, unit, total), *rest = self.levels
        if self.cuts is not None:
            index = self.index * size + digit
            stride = math.prod([level.size for level in rest])
            low, high = self.cuts[index * stride], self.cuts[(index + 1) * stride]
            return _Node(low, high, tuple(rest), self.cuts, index)
        chunk = -(-(self.high - self.low) // total) if total else self.chunk
        low = min(self.low + digit * chunk * unit, self.high)
        return _Node(low, min(low + chunk * unit, self.high), tuple(rest), None, 0, chunk)

    def digits_in(self, low: int, high: int) -> range:
        """The digits whose pieces may overlap a stretch (that overlaps this piece)."""
        _, size, unit, total = self.levels[0]
        low, high = max(low, self.low), min(high, self.high)
        if self.cuts is not None:
            stride = math.prod([level.size for level in self.levels[1:]])
            first, last = self.index * size, (self.index + 1) * size
            starts = self.cuts[first * stride : last * stride : stride]
            return range(max(bisect_right(starts, low) - 1, 0), bisect_left(starts, high))
        width = unit * (-(-(self.high - self.low) // total) if total else self.chunk)
        return range((low - self.low) // width, (high - 1 - self.low) // width + 1)

    def steady_runs(self) -> list[int]:
        """Digits at which the length of the piece below may change."""
        _, size, unit, total = self.levels[0]
        if self.cuts is not None:
            return list(range(size))
        width = unit * (-(-(self.high - self.low) // total) if total else self.chunk)
        full = (self.high - self.low) // width if width else 0
        return [0, min(full, size), min(full + 1, size)]


_Dims = list[tuple[_Node, _Node]]
"""Per dim, the piece that the source and the piece that the target have come to."""


def _sum(src: Layout, dst: Layout, parts: list[list[int]], sizes: Sequence[int]) -> int:
    """The overlaps of all devices; `parts`: the digits of the source's axes and the target's."""
    own, other = parts[: src.mesh.ndim], parts[src.mesh.ndim :]
    dims = [
        (_root(src, dim, own, sizes), _root(dst, dim, other, sizes)) for dim in range(src.ndim)
    ]
    dims = _without_last(dims)
    named = {level.digit for dim in dims for node in dim for level in node.levels}
    left_out = {d for d in range(len(sizes)) if d not in named}
    cut = {d for layout, its in ((src, own), (dst, other)) for axes in layout.dims
           for axis in axes for d in its[axis]}
    idle = math.prod([sizes[d] for d in left_out if d not in cut])
    return idle * _overlaps(dims)


def _root(layout: Layout, dim: int, parts: list[list[int]], sizes: Sequence[int]) -> _Node:
    levels = []
    for axis in layout.dims[dim]:
        total = unit = layout.mesh.axis_sizes[axis]
        for digit in parts[axis]:
            unit //= sizes[digit]
            levels.append(_Level(digit, sizes[digit], unit, total))
            total = 0
    return _Node(0, layout.shape[dim], tuple(levels), layout.cuts[dim])


def _without_last(dims: _Dims) -> _Dims:
    """Leave out last levels whose digit stands nowhere else: pieces of a piece are the piece."""
    while True:
        count = Counter(level.digit for dim in dims for node in dim for level in node.levels)
        lone = [
            [bool(node.levels) and count[node.levels[-1].digit] == 1 for node in dim]
            for dim in dims
        ]
        if not any(map(any, lone)):
            return dims
        dims = [
            (_shorter(s) if one else s, _shorter(d) if two else d)
            for (s, d), (one, two) in zip(dims, lone)
        ]


def _shorter(node: _Node) -> _Node:
    stride = node.levels[-1].size
    cuts = None if node.cuts is None else node.cuts[::stride]
    return node._replace(levels=node.levels[:-1], cuts=cuts)


def _overlaps(dims: _Dims) -> int:
    """Sum over all digits of the levels left, of the product over dims of the overlaps."""
    constant, rest = 1, []
    for s, d in dims:
        overlap = min(s.high, d.high) - max(s.low, d.low)
        if overlap <= 0:
            return 0
        if s.levels or d.levels:
            rest.append((s, d))
        else:
            constant *= overlap
    if not rest:
        return constant
    families = _families(rest)
    if len(families) > 1:
        return constant * math.prod([_overlaps(family) for family in families])
    for s, d in rest:
        if _twins(s, d):
            return constant * _overlaps(_renamed(rest, d.levels[0].digit, s.levels[0].digit))
    digit = next((node.levels[0].digit for dim in rest for node in dim
                  if node.levels and _is_steady(rest, node.levels[0].digit)), None)
    if digit is not None:
        return constant * _by_runs(rest, digit)
    return constant * _by_digits(rest)


def _families(dims: _Dims) -> list[_Dims]:
    """Dims that share no digit with others vary apart."""
    families: list[tuple[set[int], _Dims]] = []
    for dim in dims:
        members = [dim]
        digits = {level.digit for node in dim for level in node.levels if level.digit >= 0}
        for family in [family for family in families if family[0] & digits]:
            families.remove(family)
            digits, members = digits | family[0], family[1] + members
        families.append((digits, members))
    return [members for _, members in families]


def _twins(s: _Node, d: _Node) -> bool:
    """Whether both trees cut the same piece alike, by different digits."""
    if not (s.levels and d.levels) or s.levels[0].digit == d.levels[0].digit:
        return False
    return _cut_alike(s, d)


def _cut_alike(s: _Node, d: _Node) -> bool:
    if (s.low, s.high, s.levels[0][1:]) != (d.low, d.high, d.levels[0][1:]):
        return False
    if s.cuts is None and d.cuts is None:
        return bool(s.levels[0].total) or s.chunk == d.chunk
    return False


def _renamed(dims: _Dims, old: int, new: int) -> _Dims:
    def rename(node: _Node) -> _Node:
        return node._replace(levels=tuple([
            level._replace(digit=new) if level.digit == old else level for level in node.levels
        ]))

    return [(rename(s), rename(d)) for s, d in dims]


def _is_steady(dims: _Dims, digit: int) -> bool:
    """Whether only the lengths of the digit's pieces matter."""
    for s, d in dims:
        tops = [bool(node.levels) and node.levels[0].digit == digit for node in (s, d)]
        deeper = sum(level.digit == digit for node in (s, d) for level in node.levels)
        if deeper != sum(tops):
            return False
        if all(tops):
            steady = _cut_alike(s, d)
        elif any(tops):
            cut, whole = (s, d) if tops[0] else (d, s)
            steady = not whole.levels and whole.low <= cut.low and cut.high <= whole.high
        else:
            steady = True
        if not steady:
            return False
    return True


def _by_runs(dims: _Dims, digit: int) -> int:
    nodes = [node for dim in dims for node in dim if node.levels and node.levels[0].digit == digit]
    size = nodes[0].levels[0].size
    changes = sorted({size, *(at for node in nodes for at in node.steady_runs())})
    return sum(
        (stop - start) * _overlaps(_descended(dims, digit, start))
        for start, stop in pairwise(changes)
    )


def _by_digits(dims: _Dims) -> int:
    """Try the digits of the one level where the fewest pieces overlap."""
    choices = []
    for s, d in dims:
        for node, other in ((s, d), (d, s)):
            if node.levels:
                choices.append((node.digits_in(other.low, other.high), node.levels[0].digit))
    digits, which = min(choices, key=lambda choice: len(choice[0]))
    return sum(_overlaps(_descended(dims, which, digit)) for digit in digits)


def _descended(dims: _Dims, digit: int, value: int) -> _Dims:
    """All trees after one digit is known; one that is not due yet waits as -1 - value."""

    def descend(node: _Node) -> _Node:
        if any(level.digit == digit for level in node.levels):
            node = node._replace(levels=tuple([
                level._replace(digit=-1 - value) if level.digit == digit else level
                for level in node.levels
            ]))
        while node.levels and node.levels[0].digit < 0:
            node = node.child(-1 - node.levels[0].digit)
        return node

    return [(descend(s), descend(d)) for s, d in dims]
