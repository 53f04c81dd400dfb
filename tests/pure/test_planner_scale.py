"""Planning for one rank of 65,536 costs by the axes and by whom it exchanges with."""

from __future__ import annotations

import itertools
import time
import tracemalloc

import pytest

from weft.core import Layout, Mesh, P
from weft.planner import Transfer, plan
from weft.planner.geometry import volume

SQUARE = Mesh({"a": 256, "b": 256})
AWAY = Mesh({"x": 512, "y": 128}, ranks=range(65536, 131072))
RANK = 12345

PAIRS = {
    "S0 S1 -> S1 S0": (SQUARE, P("a", "b"), P("b", "a")),
    "S0 R -> R S0": (SQUARE, P("a"), P("b")),
    "R S0 -> R R": (SQUARE, P("b"), P()),
    "S1 S0 -> S1 R": (SQUARE, P("b", "a"), P(None, "a")),
    "S0 S0 -> S0 R": (SQUARE, P(("a", "b")), P("a")),
    "S0 S1 -> S0 R": (SQUARE, P("a", "b"), P("a")),
    "S0 P -> S0 S1": (SQUARE, P("a", partial={"b": "sum"}), P("a", "b")),
    "R P -> R R": (SQUARE, P(partial={"b": "sum"}), P()),
    "away: S0 S1 -> S0 S1": (AWAY, P("a", "b"), P("x", "y")),
    "away: S0 S1 -> S1 S0": (AWAY, P("a", "b"), P("y", "x")),
    "away: S0 R -> R S0": (AWAY, P("a"), P("y")),
    "away: R R -> S0 S0": (AWAY, P(), P(("x", "y"))),
}
SHAPES = {"even": (65536, 65536), "uneven": (65535, 65537)}


def work(src: Layout, dst: Layout) -> int:
    """A plan, all its figures, and what one rank sends and receives; the number of blocks."""
    found = plan(src, dst)
    assert found.total_bytes >= found.lower_bound > 0
    takers = [RANK] if src.mesh == dst.mesh else [RANK, RANK + 65536]
    count = 0
    for rank in takers:
        assert found.bytes_received(rank) <= found.peak_elements * 4
        for step in found.steps:
            by_rank = isinstance(step, Transfer)
            if not by_rank and step.src.mesh.position_of_rank(rank) is None:
                continue
            key = rank if by_rank else step.src.mesh.coordinate(rank)
            for way in ("receives", "sends"):
                blocks = getattr(step, way, lambda _: ())(key)
                assert not by_rank or all(volume(box) for _, box in blocks)
                count += len(blocks)
    return count


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_planning_for_one_rank_is_cheap(
    pair: tuple[Mesh, P, P], shape: tuple[int, int]
) -> None:
    """At most 2 ms of CPU and 10 MB, never having met the pair: other lengths each time."""
    mesh, src, dst = pair
    seconds = []
    for more in range(5):  # the least of five: the machine does other things as well
        lengths = (shape[0] + 2 * more, shape[1] + 2 * more)
        ends = Layout(SQUARE, lengths, src), Layout(mesh, lengths, dst)
        start = time.thread_time()
        count = work(*ends)
        seconds.append(time.thread_time() - start)
        assert count <= 1024
    lengths = (shape[0] + 100, shape[1] + 100)
    ends = Layout(SQUARE, lengths, src), Layout(mesh, lengths, dst)
    tracemalloc.start()
    try:
        work(*ends)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()
    assert min(seconds) <= 2e-3, seconds


def test_both_sides_of_a_large_crossing_agree() -> None:
    for src, dst in ((P("a", "b"), P("y", "x")), (P("b"), P(("x", "y"))), (P(), P("x"))):
        step = Transfer(Layout(SQUARE, (65535, 65537), src), Layout(AWAY, (65535, 65537), dst))
        for taker in range(65536, 131072, 6007):
            blocks = step.receives(taker)
            assert sum(volume(box) for _, box in blocks) == volume(step.dst.box(taker))
            assert all((taker, box) in step.sends(holder) for holder, box in blocks)
        for holder in range(0, 65536, 6007):
            assert all((holder, box) in step.receives(taker) for taker, box in step.sends(holder))


def test_the_load_of_a_large_crossing_is_shared_out() -> None:
    """256 copies of each row block serve 512 takers of its parts: two each."""
    shape = (65536, 65536)
    step = Transfer(Layout(SQUARE, shape, P("a")), Layout(AWAY, shape, P("x")))
    for holder in range(0, 65536, 997):
        sent = sum(volume(box) for _, box in step.sends(holder))
        assert sent == 65536 * 65536 * 128 // 65536


def test_lines_too_long_to_list_are_served_in_full() -> None:
    """Meshes that share devices, with more copies than are listed."""
    left, right = Mesh((90,)), Mesh((3, 60))
    step = Transfer(Layout(left, (24,)), Layout(right, (24,), P(0)), node_size=4)
    got = {(holder, taker, box) for taker in range(180) for holder, box in step.receives(taker)}
    sent = {(holder, taker, box) for holder in range(90) for taker, box in step.sends(holder)}
    assert got == sent and len(got) == 180
    assert all(holder == taker for holder, taker, _ in got if taker < 90)
    loads = [sum(holder == it and taker != it for holder, taker, _ in got) for it in range(90)]
    assert sum(loads) == 90 and max(loads) <= 4


def test_meshes_of_many_devices_in_any_order() -> None:
    """Only a mesh whose ids are in disorder keeps a table of them."""
    ids = [*range(1, 4096, 2), *range(0, 4096, 2)]
    shuffled = Layout(Mesh((64, 64), ranks=ids), (640, 64), P(0, 1))
    step = Transfer(Layout(Mesh((4096,)), (640, 64), P(0)), shuffled)
    for rank, other in itertools.product((0, 1, 777), (step.receives, step.sends)):
        assert sum(volume(box) for _, box in other(rank)) >= 0
    assert sum(volume(box) for _, box in step.receives(777)) == 10
