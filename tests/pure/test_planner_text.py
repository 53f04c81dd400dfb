"""What a plan says of itself."""

from __future__ import annotations

import pytest

from weft.core import Layout, Mesh, P
from weft.core.units import seconds_text
from weft.planner import Link, Links, plan

LINKS = Links(near=Link(10e-6, 1e-9), far=Link(20e-6, 1e-9))


def test_steps_bytes_bound_memory_and_time() -> None:
    mesh = Mesh({"dp": 2, "tp": 4})
    src = Layout(mesh, (16, 8), P("dp", partial={"tp": "sum"}))
    assert str(plan(src, Layout(mesh, (16, 8), P(None, "tp")), links=LINKS)) == (
        "[16@dp, 8] partial(sum@tp) -> [16, 8@tp] on Mesh(dp=2, tp=4)\n"
        "  1. ReduceScatter over tp: [16@dp, 8] partial(sum@tp) -> [16@dp, 8@tp]: 1.54 kB, "
        "20.2 us\n"
        "  2. AllGather over dp: [16@dp, 8@tp] -> [16, 8@tp]: 512 bytes, 10.1 us\n"
        "  received: 2.05 kB; lower bound 2.05 kB, 1.00x\n"
        "  per rank: 256 bytes each\n"
        "  memory:   320 bytes at once, at most\n"
        "  time:     30.3 us, estimated"
    )


def test_nothing_to_do() -> None:
    src = Layout(Mesh({"dp": 2}), (3, 2), P("dp"))
    assert str(plan(src, src, itemsize=2)) == (
        "[3@dp, 2] -> [3@dp, 2] on Mesh(dp=2)\n"
        "  nothing to do\n"
        "  received: 0 bytes; lower bound 0 bytes\n"
        "  per rank: 0 bytes each\n"
        "  memory:   8 bytes at once, at most\n"
        "  time:     0 us, estimated for gloo"
    )


def test_two_meshes_and_ranks_that_differ() -> None:
    src = Layout(Mesh({"dp": 2}), (5,), P("dp"))
    dst = Layout(Mesh({"tp": 3}, ranks=(1, 2, 3)), (5,), P("tp"))
    assert str(plan(src, dst, dtype="float64", links=LINKS)) == (
        "[5@dp] -> [5@tp], from Mesh(dp=2) to Mesh(tp=3)\n"
        "  1. Transfer from Mesh(dp=2) to Mesh(tp=3): [5@dp] -> [5@tp]: 40 bytes, 10 us\n"
        "  received: 40 bytes; lower bound 40 bytes, 1.00x\n"
        "  per rank: 0 bytes on 0; 8 bytes on 3; 16 bytes on 1,2\n"
        "  memory:   40 bytes at once, at most\n"
        "  time:     10 us, estimated"
    )


def test_a_local_step_sends_nothing() -> None:
    mesh = Mesh({"dp": 2})
    text = str(plan(Layout(mesh, (4,)), Layout(mesh, (4,), P("dp"))))
    assert "  1. Slice: [4] -> [4@dp]: nothing is sent\n" in text


def test_many_ranks_are_summed_up() -> None:
    mesh = Mesh({"a": 32})
    text = str(plan(Layout(mesh, (33,), P("a")), Layout(mesh, (33,))))
    assert "  per rank: min 124 bytes, median 124 bytes, max 132 bytes (32 ranks)\n" in text
    large = Mesh({"a": 256, "b": 256})
    text = str(plan(Layout(large, (65536, 65536), P("a", "b")),
                    Layout(large, (65536, 65536), P("b", "a"))))
    assert "  per rank: min 0 bytes, median 262 kB, max 262 kB (256 of 65536 ranks)\n" in text


@pytest.mark.parametrize("seconds, text", [
    (0, "0 us"), (2.5e-7, "< 1 us"), (9.9951e-7, "1 us"), (1.5e-4, "150 us"),
    (2e-3, "2 ms"), (12.34, "12.3 s"),
])
def test_durations(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
