"""What devices hold already, summed over meshes without listing them, against a list of it."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.transitions import layouts, missing, some
from weft.core import Layout, Mesh, P
from weft.planner.overlap import missing_elements

FACTORS = [
    ((6,), (2, 3)), ((4, 2), (2, 4)), ((2, 2, 2), (4, 2)), ((8,), (2, 2, 2)), ((4, 3), (2, 6)),
    ((6, 2), (3, 4)), ((2, 3), (3, 2)), ((2, 1, 3), (6, 1)),
]


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (4, 1, 4)])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (7,), (16,), (3, 4), (5, 3), (6, 7)])
def test_on_one_mesh(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    found = layouts(Mesh(sizes), shape, kinds=())
    for src, dst in some(list(itertools.product(found, found)), 120):
        assert missing_elements(src, dst) == sum(missing(src, dst).values()), (src, dst)


@pytest.mark.parametrize("ranks", [None, range(5, 100, 3)])
@pytest.mark.parametrize("sizes", FACTORS)
@pytest.mark.parametrize("shape", [(5,), (12,), (25,), (6, 5), (9, 14)])
def test_on_the_same_devices_with_other_axes(
    sizes: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...], ranks: range | None
) -> None:
    """The digits of both meshes have a common refinement, or (2x3 and 3x2) have none."""
    count = Mesh(sizes[0]).size()
    ids = None if ranks is None else ranks[:count]
    left, right = (layouts(Mesh(its, ranks=ids), shape, kinds=()) for its in sizes)
    for src, dst in some(list(itertools.product(left, right)), 30):
        assert missing_elements(src, dst) == sum(missing(src, dst).values()), (src, dst)


@pytest.mark.parametrize("start", [0, 1, 2, 4, 6, 8, 12])
@pytest.mark.parametrize("sizes", [((4, 4), (2, 4)), ((2, 8), (4, 2)), ((2, 2, 3), (4, 3))])
@pytest.mark.parametrize("shape", [(16,), (19,), (7, 5)])
def test_on_a_stretch_of_the_devices(
    sizes: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...], start: int
) -> None:
    """In blocks where the digits fit, one by one where they do not."""
    small = Mesh(sizes[1])
    left, right = Mesh(sizes[0]), Mesh(sizes[1], ranks=range(start, start + small.size()))
    ends = layouts(left, shape, kinds=()), layouts(right, shape, kinds=())
    for src, dst in some(list(itertools.product(*ends)), 30):
        assert missing_elements(src, dst) == sum(missing(src, dst).values()), (src, dst)
        assert missing_elements(dst, src) == sum(missing(dst, src).values()), (dst, src)


@pytest.mark.parametrize("ranks", [None, range(3, 9), (5, 1, 2, 0, 4, 3)])
def test_terms_that_cross(ranks: range | tuple[int, ...] | None) -> None:
    """A device that holds another term of what it wants holds nothing of it."""
    left, right = Mesh({"a": 2, "b": 3}), Mesh({"b": 3, "c": 2}, ranks=ranks)
    ends = layouts(left, (7,), ("avg",)), layouts(right, (7,), ("avg",))
    tried = 0
    for src, dst in itertools.product(*ends):
        terms = [
            [layout.mesh.axis_names[axis] for axis, kind in enumerate(layout.partial) if kind]
            for layout in (src, dst)
        ]
        if terms[0] != terms[1] or not terms[0]:
            continue
        lacking = 0
        for rank, count in missing(src, dst).items():
            own = src.mesh.position_of_rank(rank)
            there = dst.mesh.coordinate(dst.mesh.position_of_rank(rank) or 0)
            same = own is not None and src.mesh.coordinate(own)[1] == there[0]
            lacking += count if same else math.prod(dst.local_shape(rank))
        assert missing_elements(src, dst) == lacking, (src, dst)
        tried += 1
    assert tried == 9


def test_interleaved_and_partly_shared_devices() -> None:
    even, odd = Mesh((4,), ranks=range(0, 8, 2)), Mesh((4,), ranks=range(1, 9, 2))
    some_of_them = Mesh((2, 2), ranks=(6, 1, 0, 11))
    for left, right in itertools.permutations((even, odd, some_of_them), 2):
        for spec in (P(), P(0)):
            src, dst = Layout(left, (9,), P(0)), Layout(right, (9,), spec)
            assert missing_elements(src, dst) == sum(missing(src, dst).values())


def test_only_the_own_term_counts_where_terms_cross() -> None:
    src = Layout(Mesh({"a": 2, "b": 2}), (6,), P("a", partial={"b": "sum"}))
    dst = Layout(Mesh({"b": 2, "c": 2}), (6,), P(partial={"b": "sum"}))
    # Ranks 0 to 3 hold terms 0, 1, 0, 1 and are to have 0, 0, 1, 1: ranks 1 and 2 hold nothing.
    assert missing_elements(src, dst) == 3 + 6 + 6 + 3
