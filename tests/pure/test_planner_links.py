"""One cost function, over networks that are given: fewer bytes or fewer steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import weft
from weft.core import Layout, Mesh, P
from weft.errors import ShardTypeError
from weft.planner import (
    GLOO,
    NCCL,
    AllGather,
    AllReduce,
    Exchange,
    Link,
    Links,
    ReduceScatter,
    Slice,
    plan,
    set_links,
    step_seconds,
)

BYTES = Links(near=Link(0, 1e-9), far=Link(0, 1e-9))
STARTS = Links(near=Link(0, 0), far=Link(0, 0), start_s=1.0)


@pytest.fixture
def default_links() -> Iterator[None]:
    yield
    set_links("gloo")


def steps(src: P, dst: P, links: Links, shape: tuple[int, int] = (16, 24)) -> list[type]:
    mesh = Mesh({"a": 2, "b": 4})
    found = plan(Layout(mesh, shape, src), Layout(mesh, shape, dst), links=links)
    assert found.lower_bound <= found.total_bytes
    return [type(step) for step in found.steps]


TRADES = [
    # source, target, steps where bytes count, steps where starts count
    (P(partial={"a": "sum", "b": "sum"}), P("a"), [ReduceScatter, AllReduce], [AllReduce, Slice]),
    (P(partial={"b": "sum"}), P(), [ReduceScatter, AllGather], [AllReduce]),  # replicas share
    (P("b", partial={"a": "sum"}), P(None, "b"), [ReduceScatter, Exchange], [AllReduce, Exchange]),
]


@pytest.mark.parametrize("src, dst, by_bytes, by_starts", TRADES)
def test_latency_against_volume(src: P, dst: P, by_bytes: list, by_starts: list) -> None:
    assert steps(src, dst, BYTES) == by_bytes
    few = steps(src, dst, STARTS)
    assert len([it for it in few if it is not Slice]) == len(
        [it for it in by_starts if it is not Slice]
    )


def test_small_tensors_take_few_steps_and_large_ones_few_bytes() -> None:
    src, dst = P(partial={"b": "sum"}), P()
    assert steps(src, dst, GLOO) == [AllReduce]
    assert len(steps(src, dst, GLOO, (4096, 4096))) > 1


def test_replicas_share_a_reduction() -> None:
    mesh = Mesh({"a": 4, "b": 4})
    found = plan(Layout(mesh, (64, 64), P(partial={"b": "sum"})), Layout(mesh, (64, 64)),
                 links=BYTES)
    nbytes = 64 * 64 * 4
    alone = 2 * nbytes * 3 // 4
    assert found.bytes_received(0) == nbytes // 4 * 3 // 4 + nbytes * 15 // 16 < alone


def test_terms_that_move_are_reduced_first_and_moved_at_the_smallest_size() -> None:
    mesh = Mesh({"a": 2, "b": 2})
    src = Layout(mesh, (8, 8), P("b", partial={"a": "sum"}))
    found = plan(src, Layout(mesh, (8, 8), P(None, "b")), links=BYTES)
    assert found.total_bytes == 640  # all-reduce and exchange would be 768


def test_seconds_are_starts_rounds_members_and_bytes() -> None:
    mesh = Mesh({"dp": 4, "tp": 8})
    links = Links(near=Link(1e-3, 1e-6), far=Link(1e-2, 1e-5), start_s=1.0, member_s=0.1)
    def seconds(src: P, dst: P) -> float:
        (step,) = plan(Layout(mesh, (64, 32), src), Layout(mesh, (64, 32), dst)).steps
        return step_seconds(step, 4, links)

    own = 64 * 32 * 4
    # tp is within nodes of 8: three doublings, seven others. dp is not: two and three.
    assert seconds(P("tp"), P()) == pytest.approx(1 + 3e-3 + 0.7 + own * 7 / 8 * 1e-6)
    assert seconds(P("dp"), P()) == pytest.approx(1 + 2e-2 + 0.3 + own * 3 / 4 * 1e-5)
    assert seconds(P(partial={"tp": "sum"}), P()) == pytest.approx(
        1 + 6e-3 + 1.4 + own * 7 / 4 * 1e-6
    )
    assert seconds(P(), P("dp")) == 0


def test_axes_have_networks_of_their_own() -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    slow = Links(near=Link(0, 1e-9), far=Link(0, 1e-9), axes={"dp": Link(0, 1e-6)})
    gather = {
        axis: plan(Layout(mesh, (8,), P(axis)), Layout(mesh, (8,)), links=slow).seconds
        for axis in ("dp", "tp")
    }
    assert gather["dp"] == pytest.approx(1000 * gather["tp"])
    assert hash(slow) == hash(Links(slow.near, slow.far, axes=(("dp", Link(0, 1e-6)),)))


NEAR, FAR = 1.0, 100.0
NODES = [
    # mesh, axis, node size, whether its groups stay on one node
    (Mesh((4, 8)), 1, 8, True), (Mesh((4, 8)), 0, 8, False), (Mesh((2, 3)), 0, 8, True),
    (Mesh((4, 6)), 1, 8, False), (Mesh((8, 2), ranks=range(3, 19)), 1, 8, False),
    (Mesh((8, 2), ranks=range(8, 24)), 1, 8, True), (Mesh((2, 2), ranks=(0, 9, 1, 8)), 0, 8, True),
    (Mesh((2, 2), ranks=(0, 9, 1, 8)), 1, 8, False),
    (Mesh((4, 2), ranks=range(0, 16, 2)), 1, 4, True),
]


@pytest.mark.parametrize("mesh, axis, node_size, near", NODES)
def test_which_axes_stay_on_a_node(mesh: Mesh, axis: int, node_size: int, near: bool) -> None:
    links = Links(near=Link(NEAR, 0), far=Link(FAR, 0), node_size=node_size)
    rounds = (mesh.axis_sizes[axis] - 1).bit_length()
    assert links.seconds_over(mesh, (axis,), 0, 1) == rounds * (NEAR if near else FAR)


def test_the_default_is_set_for_all_plans(default_links: None) -> None:
    mesh = Mesh({"a": 8, "b": 2})
    ends = Layout(mesh, (64, 64), P("a")), Layout(mesh, (64, 64))
    slow = plan(*ends)
    weft.set_links("nccl")
    fast = plan(*ends)
    assert fast.links is NCCL and slow.links is GLOO and fast.seconds < slow.seconds
    assert plan(*ends, links="gloo") is slow
    weft.set_links(BYTES)
    assert plan(*ends).links is BYTES


FAST: Any = "fast"
FIVE: Any = 5
WRONG: list[tuple[Any, str]] = [
    (lambda: Link(-1, 0), "Link(latency_s): latency_s is -1."),
    (lambda: Link(0, FAST), "Link(seconds_per_byte): seconds_per_byte is 'fast'."),
    (lambda: Links(Link(0, 0), Link(0, 0), node_size=0), "Links(node_size): node_size is 0."),
    (lambda: Links(Link(0, 0), FIVE), "Links: 1 networks are no weft.Link."),
    (lambda: Links(Link(0, 0), Link(0, 0), start_s=-1), "Links(start_s): start_s is -1."),
    (lambda: set_links("ib"), "set_links(links): 'ib' is no network."),
]


@pytest.mark.parametrize("make, facts", WRONG)
def test_networks_that_cannot_be(make: Any, facts: str) -> None:
    with pytest.raises(ShardTypeError) as caught:
        make()
    lines = str(caught.value).splitlines()
    assert lines[0] == facts
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["Rule", "Offenders", "Fix"]
