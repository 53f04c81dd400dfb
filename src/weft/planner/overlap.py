"""How much of their target boxes the devices hold already, summed over the meshes.

Theory of operation. The sum over all devices of |source box ∩ target box| is a product of sums:
over the dims, of overlaps of two intervals. The interval of a device is found by descending in the
*tree* of a dim, level by level, by the device's digits. A digit that no tree has multiplies. A
digit that is only on the last level of one tree is summed by omitting the level (the pieces of a
piece are the piece). The rest is summed by descending in all trees at once, a digit at a time:

- *steady*: every tree with the digit cuts alike in both layouts, or cuts a piece that lies in
  one piece of the other. Then only lengths matter, and those of default cuts are equal except for
  the last few: one descent for each run of equal lengths.
- *twins*: both trees of a dim cut the same piece alike, by different digits. There is an overlap
  only where the digits are equal, so the two become one.
- otherwise the digits are tried, those for which the pieces still overlap.

So the run time grows with the axes, and in the last case with the pieces that overlap, but not with
the devices. Two meshes share digits if both have evenly spaced devices and their sizes have a
common refinement (in blocks, if only some of the devices are in both); otherwise the devices that
are in both are listed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.planner.geometry import intersect, num_copies, strip, volume
from weft.planner.holders import Side

__all__ = ["missing_elements", "shared_ranks"]

_BLOCKS = 16
"""Blocks of shared devices that are summed one by one."""


@lru_cache(maxsize=4096)
def missing_elements(src: Layout, dst: Layout) -> int:
    """Elements of their target boxes that the devices of the target's mesh do not hold.

    Where partial axes stay partial, of the device's own partial value. One mesh or two.
    """
    src, dst = strip(src), strip(dst)
    return math.prod(src.shape) * num_copies(dst) - _kept(src, dst)


def _kept(src: Layout, dst: Layout) -> int:
    if src.mesh == dst.mesh:
        sizes = src.mesh.axis_sizes
        axes = [[axis] for axis in range(len(sizes))]
        return _sum(_roots(src, axes, sizes), _roots(dst, axes, sizes), sizes)
    shared = _refinement(src.mesh, dst.mesh)
    if shared is not None:
        own, other, sizes, blocks = shared
        if not blocks:
            return 0
        ends = _roots(src, own, sizes), _roots(dst, other, sizes)
        return sum(_sum(*ends, sizes, fixed) for fixed in blocks)
    here, there, total = Side(src), Side(dst), 0
    for rank in shared_ranks(src.mesh, dst.mesh):
        at, to = here.at(rank), there.at(rank)
        assert at is not None and to is not None
        if here.partial_digits(at) == there.partial_digits(to):
            both = intersect(src.box_at(at), dst.box_at(to))
            total += 0 if both is None else volume(both)
    return total


def shared_ranks(left: Mesh, right: Mesh) -> Iterator[int]:
    """The device ids that are in both meshes."""
    small, large = (left, right) if left.size() <= right.size() else (right, left)
    (a, b), (c, d) = small.rank_span, large.rank_span
    if b <= c or d <= a:
        return
    one, two = left.rank_range, right.rank_range
    if one is not None and two is not None and one.step == two.step:
        if (a - c) % one.step == 0:
            yield from range(max(a, c), min(b, d), one.step)
        return
    for rank in map(small.rank_at, range(small.size())):
        if large.position_of_rank(rank) is not None:
            yield rank


_Parts = list[list[int]]
"""For each axis of a mesh, the digits that it is made of, major to minor."""


def _refinement(
    left: Mesh, right: Mesh
) -> tuple[_Parts, _Parts, list[int], list[dict[int, int]]] | None:
    """Digits that make up the axes of both meshes, if there are any: axes, sizes, blocks.

    The devices in both meshes are divided into blocks of positions. Within a block the lower digits
    of both meshes run through all their values together; a block fixes the upper ones.
    """
    one, two = left.rank_range, right.rank_range
    if one is None or two is None or one.step != two.step:
        return None
    first, last = max(one[0], two[0]), min(one[-1], two[-1])
    count = (last - first) // one.step + 1
    if count <= 0 or first not in one or first not in two:
        return [], [], [], []  # no devices, no blocks
    starts = one.index(first), two.index(first)
    block = math.gcd(*starts, count)
    strides = sorted({1, block, *(s for s in left.axis_strides + right.axis_strides if s < block)})
    if count // block > _BLOCKS or any(major % minor for minor, major in pairwise(strides)):
        return None
    sizes = [major // minor for minor, major in pairwise(strides)]
    digits = {stride: digit for digit, stride in enumerate(strides)}
    parts: list[_Parts] = []
    blocks: list[dict[int, int]] = [{} for _ in range(count // block)]
    for mesh, start in zip((left, right), starts):
        parts.append([])
        for stride, size in zip(mesh.axis_strides, mesh.axis_sizes):
            lower = [s for s in strides[-2::-1] if stride <= s < stride * size]
            upper, rest = max(stride, block), stride * size // max(stride, block)
            if stride * size > block:
                if stride * size % block or (stride > block and stride % block):
                    return None
                lower.insert(0, upper)
                sizes.append(rest)
                for number, fixed in enumerate(blocks):
                    fixed[len(sizes) - 1] = (start + number * block) // upper % rest
            parts[-1].append([len(sizes) - 1 if s >= block else digits[s] for s in lower])
    return parts[0], parts[1], sizes, blocks


class _Level(NamedTuple):
    """One step down a tree: `size` digits, each of them `unit` pieces of the `total` of an axis.

    `total` is 0 if a level above has begun to cut by the same axis.
    """

    digit: int
    size: int
    unit: int
    total: int


class _Node(NamedTuple):
    """A piece of a dim in one layout, and how it is cut further.

    Explicit cuts are found at `place`; default ones by `chunk`, the length of the axis's pieces.
    """

    low: int
    high: int
    levels: tuple[_Level, ...]
    cuts: tuple[int, ...] | None = None
    place: int = 0
    chunk: int = 0

    def child(self, digit: int) -> _Node:
        (_, size, unit, total), *rest = self.levels
        if self.cuts is not None:
            index = self.place * size + digit
            stride = math.prod([level.size for level in rest])
            low, high = self.cuts[index * stride], self.cuts[(index + 1) * stride]
            return _Node(low, high, tuple(rest), self.cuts, index)
        chunk = -(-(self.high - self.low) // total) if total else self.chunk
        low = min(self.low + digit * chunk * unit, self.high)
        return _Node(low, min(low + chunk * unit, self.high), tuple(rest), None, 0, chunk)

    def digits_in(self, low: int, high: int) -> range:
        """The digits whose pieces may overlap an interval (which overlaps this piece)."""
        _, size, unit, total = self.levels[0]
        low, high = max(low, self.low), min(high, self.high)
        if self.cuts is not None:
            stride = math.prod([level.size for level in self.levels[1:]])
            first, last = self.place * size, (self.place + 1) * size
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
"""Per dim, the current piece of the source and the current piece of the target."""


def _sum(
    src: Sequence[_Node], dst: Sequence[_Node], sizes: Sequence[int], fixed: Mapping[int, int] = {}
) -> int:
    """The overlaps of all devices, or of those at which some digits have given values."""
    dims = list(zip(src, dst))
    cut = {level.digit for dim in dims for node in dim for level in node.levels}
    idle = math.prod([
        size for digit, size in enumerate(sizes) if digit not in cut and digit not in fixed
    ])
    for digit, value in fixed.items():
        dims = _descended(dims, digit, value)
    return idle * _overlaps(_without_last(dims))


def _roots(layout: Layout, parts: _Parts, sizes: Sequence[int]) -> list[_Node]:
    """The trees of all dims, and of the axes that stay partial: a dim with one element each."""
    dims = [
        _Node(0, length, _levels(layout.mesh, axes, parts, sizes), cuts)
        for length, axes, cuts in zip(layout.shape, layout.dims, layout.cuts)
    ]
    partial = [
        _Node(0, layout.mesh.axis_sizes[axis], _levels(layout.mesh, (axis,), parts, sizes))
        for axis in Side(layout).partial_axes
    ]
    return dims + partial


def _levels(
    mesh: Mesh, axes: Sequence[int], parts: _Parts, sizes: Sequence[int]
) -> tuple[_Level, ...]:
    levels: list[_Level] = []
    for axis in axes:
        total = unit = mesh.axis_sizes[axis]
        for digit in parts[axis]:
            unit //= sizes[digit]
            levels.append(_Level(digit, sizes[digit], unit, total))
            total = 0
    return tuple(levels)


def _without_last(dims: _Dims) -> _Dims:
    """Omit last levels whose digit occurs nowhere else: the pieces of a piece are the piece."""
    while True:
        count = Counter(level.digit for dim in dims for node in dim for level in node.levels)
        lone = [
            [bool(node.levels) and node.levels[-1].digit >= 0
             and count[node.levels[-1].digit] == 1 for node in dim]
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
    """Sum, over all digits of the remaining levels, of the product over dims of the overlaps."""
    constant = 1
    rest: _Dims = []
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
            both = d.levels[0].digit, s.levels[0].digit
            return constant * _overlaps([
                (_renamed(one, *both), _renamed(other, *both)) for one, other in rest
            ])
    digit = next((node.levels[0].digit for dim in rest for node in dim
                  if node.levels and _is_steady(rest, node.levels[0].digit)), None)
    if digit is not None:
        return constant * _by_runs(rest, digit)
    return constant * _by_digits(rest)


def _families(dims: _Dims) -> list[_Dims]:
    """Groups of dims that share digits; different groups vary independently."""
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
    is_default = s.cuts is None and d.cuts is None
    return is_default and (bool(s.levels[0].total) or s.chunk == d.chunk)


def _renamed(node: _Node, old: int, new: int) -> _Node:
    """A tree with another number for a digit."""
    if all(level.digit != old for level in node.levels):
        return node
    return node._replace(levels=tuple([
        level._replace(digit=new) if level.digit == old else level for level in node.levels
    ]))


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
    choices: list[tuple[Sequence[int], int]] = []
    for s, d in dims:
        for node, other in ((s, d), (d, s)):
            if node.levels:
                choices.append((node.digits_in(other.low, other.high), node.levels[0].digit))
    digits, which = min(choices, key=lambda choice: len(choice[0]))
    return sum(_overlaps(_descended(dims, which, digit)) for digit in digits)


def _descended(dims: _Dims, digit: int, value: int) -> _Dims:
    """All trees after one digit is known; a digit that is used only later waits as -1 - value."""

    def descend(node: _Node) -> _Node:
        node = _renamed(node, digit, -1 - value)
        while node.levels and node.levels[0].digit < 0:
            node = node.child(-1 - node.levels[0].digit)
        return node

    return [(descend(s), descend(d)) for s, d in dims]
