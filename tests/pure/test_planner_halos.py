"""Halos as plans: what ranks read of each other's shards, and the sums that go back."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.interpret import PlanError, interpret
from weft.core import Cover, Interval, Layout, Mesh, P
from weft.planner import Plan, fetching, folding, gradient_layout, plan

ROWS = ((3, 3), (2, 1, 2, 1), (0, 4, 1, 1), (6, 0), (1, 1, 1, 1, 1, 1), (0, 0, 6), (5, 1))
AROUND = ((0, 0), (1, 0), (0, 2), (1, 1), (4, 7), (-1, 1))
"""What is read in front of a shard and behind it; less than nothing leaves elements out."""


def around(layout: Layout, dim: int, before: int, behind: int) -> tuple[Interval, ...]:
    """Of each shard that has elements, the interval with so much around it."""
    own = [layout.interval(dim, at) for at in range(layout.num_shards(dim))]
    return tuple([
        (start - before, max(stop + behind, start - before)) if start < stop else (start, start)
        for start, stop in own
    ])


def received(plan: Plan) -> int:
    return sum(plan.bytes_received(rank) for rank in range(plan.src.mesh.size()))


def judged(plan: Plan) -> Plan:
    """The plan, carried out on symbols, whose bytes are those of its ranks."""
    interpret(plan)
    assert received(plan) == plan.total_bytes
    return plan


@pytest.mark.parametrize("rings", [(), (0,)], ids=["ends", "ring"])
@pytest.mark.parametrize("sizes, around_it", [*itertools.product(ROWS, AROUND)])
def test_lines(sizes: tuple[int, ...], around_it: tuple[int, int], rings: tuple[int, ...]) -> None:
    layout = Layout(Mesh({"x": len(sizes), "r": 2}), (6,), P("x"), sizes={0: sizes})
    cover = Cover.of(layout, (around(layout, 0, *around_it),), rings=rings)
    if cover is None:
        assert around_it == (0, 0)
        return
    there = judged(fetching(layout, layout, cover))
    back = judged(there.transpose())
    assert back.total_bytes == there.total_bytes
    assert judged(back.transpose()).total_bytes == there.total_bytes


@pytest.mark.parametrize("rows", [(4, 1, 2), (0, 7, 0), None])
@pytest.mark.parametrize("columns", [(5, 0), (2, 3), None])
@pytest.mark.parametrize("rings", [(), (0,), (0, 1)])
def test_two_dims_in_one_exchange(
    rows: tuple[int, ...] | None, columns: tuple[int, ...] | None, rings: tuple[int, ...]
) -> None:
    """Edges and corners come together, from shards of other cuts too."""
    mesh = Mesh({"x": 3, "y": 2, "r": 2})
    layout = Layout(mesh, (7, 5), P("x", "y"))
    sizes = {dim: its for dim, its in enumerate((rows, columns)) if its}
    other = Layout(mesh, (7, 5), P("x", "y"), sizes=sizes)
    cover = Cover.of(layout, (around(layout, 0, 1, 2), around(layout, 1, 2, 1)), rings=rings)
    assert cover is not None
    there = judged(fetching(other, layout, cover))
    assert len(there.steps) == 1
    assert len(judged(there.transpose()).steps) == 1


@pytest.mark.parametrize("target", [
    P(None, ("x", "y")), P(("y", "x")), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))])
@pytest.mark.parametrize("rings", [(), (0, 1)])
def test_shards_of_other_dims_in_one_exchange(target: P, rings: tuple[int, ...]) -> None:
    """The same axes shard other dims, or in another order: who lacks what gets it at once."""
    mesh = Mesh({"x": 3, "y": 2, "r": 2})
    boxes = Layout(mesh, (7, 5), target)
    cover = Cover.of(boxes, tuple([
        around(boxes, dim, 1, 2) if boxes.dims[dim] else None for dim in (0, 1)]), rings=rings)
    assert cover is not None
    for shards in (Layout(mesh, (7, 5), P("x", "y")),
                   Layout(mesh, (7, 5), P(("x", "y")), sizes={0: (0, 3, 1, 0, 2, 1)})):
        there = judged(fetching(shards, boxes, cover))
        back = judged(there.transpose())
        assert len(there.steps) == len(back.steps) == 1
        assert (there.total_bytes == 0) <= (shards == boxes)
        apart = fetching(boxes, boxes, cover).total_bytes + plan(shards, boxes).total_bytes
        assert there.total_bytes <= apart


def test_partial_values() -> None:
    """Those of an operand pass; those of a gradient are reduced once they are sums of boxes."""
    mesh = Mesh({"x": 3, "r": 2})
    layout = Layout(mesh, (7,), P("x"))
    cover = Cover.of(layout, (around(layout, 0, 1, 1),))
    assert cover is not None
    partial = layout.with_partial([1])
    assert len(judged(fetching(partial, partial, cover)).steps) == 1
    assert len(judged(fetching(partial, layout, cover)).steps) == 2
    varying = gradient_layout(layout, frozenset({1}))
    assert [type(step).__name__ for step in judged(folding(varying, cover, layout)).steps] == [
        "Fold", "AllReduce"]


def test_bytes_are_the_rows_that_are_read() -> None:
    layout = Layout(Mesh({"x": 4}), (16, 10), P("x"))
    cover = Cover.of(layout, (around(layout, 0, 1, 2), None))
    assert cover is not None
    there = fetching(layout, layout, cover, 8)
    assert [there.bytes_received(rank) for rank in range(4)] == [160, 240, 240, 80]
    back = there.transpose()
    assert [back.bytes_received(rank) for rank in range(4)] == [80, 240, 240, 160]


def test_what_the_judge_finds() -> None:
    """A fetch that reads too little, and a sum of which a part is missing, are no plans."""
    layout = Layout(Mesh({"x": 2}), (6,), P("x"))
    more, less = [Cover.of(layout, (around(layout, 0, 0, width),)) for width in (2, 1)]
    assert more is not None and less is not None
    there, back = fetching(layout, layout, less), folding(layout, less, layout)
    for wrong in (Plan(layout, layout, there.steps, cover=more),
                  Plan(layout, layout, back.steps, folds=more)):
        with pytest.raises((PlanError, KeyError)):
            interpret(wrong)


def test_text() -> None:
    layout = Layout(Mesh({"x": 4}), (16, 10), P("x"))
    cover = Cover.of(layout, (around(layout, 0, 1, 2), None))
    assert cover is not None
    plan = fetching(layout, layout, cover)
    assert "1. Halo over x: dim 0 by 1 and 2, of [16@x, 10]" in str(plan)
    assert "1. Sum of halos over x: dim 0 by 1 and 2, of [16@x, 10]" in str(plan.transpose())


def test_many_ranks() -> None:
    """What one rank of 65,536 exchanges, and what all do, takes as long as a dim has shards."""
    layout = Layout(Mesh({"x": 256, "y": 256}), (2048, 2048), P("x", "y"))
    cover = Cover.of(layout, (around(layout, 0, 1, 1), around(layout, 1, 1, 1)))
    assert cover is not None
    start = time.thread_time()
    plan = fetching(layout, layout, cover, 4)
    assert plan.bytes_received(257) == 4 * (10 * 10 - 8 * 8)
    assert plan.total_bytes == 4 * ((2048 + 510) ** 2 - 2048**2)
    assert plan.transpose().bytes_received(257) == plan.bytes_received(257)
    assert time.thread_time() - start < 1.0
