"""From one mesh to another: every device gets its box, takes what it lacks, from near by."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest

from tests.interpret import interpret
from tests.naive import naive
from tests.transitions import layouts, missing, some
from weft.core import Layout, Mesh, P
from weft.errors import LayoutError
from weft.planner import (
    AllGather,
    AllReduce,
    Exchange,
    Link,
    Links,
    MakePartial,
    Plan,
    ReduceScatter,
    Transfer,
    check,
    is_local,
    plan,
)
from weft.planner.geometry import largest, strip, volume
from weft.planner.search import family

MESHES = {
    "disjoint": (Mesh((2,)), Mesh((3,), ranks=(2, 3, 4))),
    "overlapping": (Mesh((3,)), Mesh((2, 2), ranks=(1, 2, 3, 4))),
    "other order": (Mesh((2, 2)), Mesh((4,), ranks=(2, 0, 3, 1))),
    "other factors": (Mesh((2, 3)), Mesh((3, 2))),
    "other names": (Mesh({"a": 2, "b": 2}), Mesh({"b": 2, "a": 2})),
    "part of it": (Mesh((2, 2)), Mesh((2,), ranks=(1, 3))),
    "one device": (Mesh((1,), ranks=(5,)), Mesh((2, 2))),
    "other nodes": (Mesh((2, 2)), Mesh((2, 2), ranks=range(3, 11, 2))),
    "none shared": (Mesh((3, 1)), Mesh((2, 2), ranks=range(40, 44))),
}
SHAPES = [*[(n,) for n in range(6)], (), (2, 0), (1, 3), (3, 4), (5, 2)]
EVERY = [pytest.param(*pair, id=name) for name, pair in MESHES.items()]


def pairs(left: Mesh, right: Mesh, kinds: tuple[str, ...]) -> list[tuple[Layout, Layout]]:
    """Every pair of layouts, either way."""
    out = []
    for shape in SHAPES:
        ends = [layouts(mesh, shape, kinds) for mesh in (left, right)]
        out += [*itertools.product(*ends), *itertools.product(*ends[::-1])]
    return out


def ranks_of(*layouts: Layout) -> list[int]:
    meshes = [layout.mesh for layout in layouts]
    return sorted({mesh.rank_at(place) for mesh in meshes for place in range(mesh.size())})


@pytest.mark.parametrize("left, right", EVERY)
def test_values_cross_by_exactly_what_is_missing(left: Mesh, right: Mesh) -> None:
    for src, dst in some(pairs(left, right, ()), 400):
        found = plan(src, dst, 8)
        assert interpret(found) == interpret(naive(src, dst)), str(found)
        lacking = missing(src, dst)
        received = {rank: found.bytes_received(rank) for rank in ranks_of(src, dst)}
        assert received == {rank: 8 * lacking.get(rank, 0) for rank in received}
        assert found.total_bytes == found.lower_bound == sum(received.values())
        assert sum(not is_local(step) for step in found.steps) <= 1


@pytest.mark.parametrize("left, right", EVERY)
@pytest.mark.parametrize("kind", ["sum", "max"])
def test_reductions_come_before_and_terms_after(left: Mesh, right: Mesh, kind: str) -> None:
    for src, dst in some(pairs(left, right, (kind,)), 200):
        found = plan(src, dst)
        world = interpret(found)
        assert dst.is_partial or world == interpret(naive(src, dst)), str(found)
        assert found.lower_bound <= found.total_bytes <= naive(src, dst).total_bytes, str(found)
        limit = max(largest(src), largest(dst))
        assert all(largest(step.dst) <= limit for step in found.steps), str(found)


@pytest.mark.parametrize("left, right", EVERY)
def test_gradients_cross_back(left: Mesh, right: Mesh) -> None:
    for src, dst in some(pairs(left, right, ("sum",)), 50):
        back = plan(src, dst).transpose()
        assert (back.src.mesh, back.dst.mesh) == (dst.mesh, src.mesh)
        assert not back.src.is_partial and not back.dst.is_partial
        interpret(back)


TWO = Mesh({"a": 2, "b": 4}), Mesh({"c": 2, "b": 4}, ranks=range(8, 16))
ROWS = [
    # source, target, the steps where only bytes count
    (P("a"), P("c"), [Transfer]),
    (P(), P("c", "b"), [Transfer]),
    (P("a", partial={"b": "sum"}), P("c"), [ReduceScatter, Transfer]),
    (P("a", partial={"b": "sum"}), P("c", partial={"b": "sum"}), [Transfer]),
    (P("a", partial={"b": "sum"}), P("b", partial={"c": "sum"}),
     [ReduceScatter, Transfer, MakePartial]),
    (P("a", partial={"b": "avg"}), P("c", partial={"b": "avg"}), [Transfer]),
    (P("a"), P(partial={"c": "sum"}), [Transfer, MakePartial]),
    (P("a"), P(partial={"c": "max"}), [Transfer, MakePartial]),
]


@pytest.mark.parametrize("src, dst, steps", ROWS)
def test_which_steps_a_pair_takes(src: P, dst: P, steps: list[type]) -> None:
    bytes_only = Links(near=Link(0, 1e-9), far=Link(0, 1e-9))
    found = plan(Layout(TWO[0], (16, 24), src), Layout(TWO[1], (16, 24), dst), links=bytes_only)
    interpret(found)
    assert [type(step) for step in found.steps] == steps, str(found)
    assert found.total_bytes == found.lower_bound


def test_an_element_of_a_sum_comes_over_once() -> None:
    src, dst = Layout(TWO[0], (16, 24)), Layout(TWO[1], (16, 24), P(partial={"b": "sum"}))
    assert plan(src, dst).total_bytes == 2 * 16 * 24 * 4  # once per replica over c


def test_what_is_to_be_replicated_is_handed_on_where_that_is_faster() -> None:
    """One device gives a large tensor to eight: a part to each, and they gather it."""
    src, many = Mesh((1,)), Mesh((8,), ranks=range(8, 16))
    for shape, steps in (((16,), [Transfer]), ((1 << 24,), [Transfer, AllGather])):
        found = plan(Layout(src, shape), Layout(many, shape))
        assert [type(step) for step in found.steps] == steps
        assert found.total_bytes == found.lower_bound == 8 * 4 * shape[0]
        assert {found.bytes_received(rank) for rank in range(8, 16)} == {4 * shape[0]}


def test_the_same_devices_in_another_order_exchange_what_differs() -> None:
    src, dst = Layout(Mesh((4,)), (8,), P(0)), Layout(Mesh((4,), ranks=(0, 2, 1, 3)), (8,), P(0))
    found = plan(src, dst)
    assert [found.bytes_received(rank) for rank in range(4)] == [0, 8, 8, 0]
    same = plan(src, Layout(Mesh({"x": 2, "y": 2}), (8,), P(("x", "y"))))
    assert [is_local(step) for step in same.steps] == [True]
    assert same.total_bytes == same.seconds == 0


@pytest.mark.parametrize("kind", ["sum", "avg", "bxor"])
def test_terms_cross_as_values_do(kind: str) -> None:
    left = Mesh({"a": 2, "b": 2})
    right = Mesh({"b": 2, "c": 3}, ranks=(3, 2, 4, 5, 6, 7))
    src = Layout(left, (5,), P("a", partial={"b": kind}))
    for spec in (P("c", partial={"b": kind}), P(partial={"b": kind})):
        dst = Layout(right, (5,), spec)
        interpret(Plan(src, dst, (Transfer(src, dst),)))
        interpret(plan(src, dst))
        interpret(naive(src, dst))


def test_terms_of_another_kind_are_reduced_before() -> None:
    src = Layout(TWO[0], (6,), P(partial={"b": "max"}))
    dst = Layout(TWO[1], (6,), P(partial={"b": "sum"}))
    interpret(plan(src, dst))
    assert isinstance(plan(src, dst).steps[-1], MakePartial)


def allowed(src: Layout, dst: Layout) -> bool:
    try:
        check(src, dst)
    except LayoutError:
        return False
    return True


@pytest.mark.parametrize("kinds", [("sum",), ("avg", "sum"), ("max",), ("product",), ("bxor",)])
def test_every_member_of_a_family_is_a_plan(kinds: tuple[str, ...]) -> None:
    """Not only the one that is chosen."""
    for left, right in MESHES.values():
        ends = layouts(left, (5, 2), kinds), layouts(right, (5, 2), kinds)
        both = [(src, dst) for src, dst in itertools.product(*ends)
                if src.is_partial and dst.is_partial and allowed(src, dst)]
        for src, dst in some(both, 25):
            for steps in family(strip(src), strip(dst), 8):
                interpret(Plan(src, dst, steps))


def test_means_cross_as_terms_and_sums_beside_them_may_not() -> None:
    src = Layout(Mesh({"a": 2, "b": 2}), (6,), P(partial={"a": "avg", "b": "sum"}))
    dst = Layout(Mesh({"a": 2, "b": 2}, ranks=range(9, 13)), (6,),
                 P(partial={"a": "avg", "b": "sum"}))
    interpret(plan(src, dst))
    interpret(naive(src, dst))
    assert [type(step) for step in naive(src, dst).steps] == [AllReduce, Transfer, MakePartial]


# Who serves whom.


def served(step: Transfer) -> list[tuple[int, int, tuple[tuple[int, int], ...]]]:
    takers = ranks_of(step.dst)
    return [(holder, taker, box) for taker in takers for holder, box in step.receives(taker)]


def holders_of(
    step: Transfer | Exchange | AllGather, box: tuple[tuple[int, int], ...]
) -> list[int]:
    """The devices whose source box holds a box, found by looking at all of them."""
    return [
        rank for rank in ranks_of(step.src)
        if all(a <= c and d <= b for (a, b), (c, d) in zip(step.src.box(rank), box))
    ]


def distance(left: int, right: int, node_size: int) -> int:
    return 0 if left == right else 1 if left // node_size == right // node_size else 2


COPIES = [
    # source and target with replicas, on meshes that are apart, near, nested, interleaved
    (Mesh((8,)), P(), Mesh((8,), ranks=range(8, 16)), P(0)),
    (Mesh((8,)), P(), Mesh((16,), ranks=range(16)), P()),
    (Mesh((4,)), P(), Mesh((12,), ranks=range(12)), P()),
    (Mesh((4, 2)), P(0), Mesh((2, 8), ranks=range(8, 24)), P(0)),
    (Mesh((2, 4)), P(0), Mesh((3, 4), ranks=range(6, 18)), P(1)),
    (Mesh((2, 4), ranks=range(0, 16, 2)), P(0), Mesh((2, 4), ranks=range(1, 17, 2)), P(1)),
    (Mesh((2, 2, 2)), P(1), Mesh((3, 3), ranks=(4, 9, 0, 17, 2, 3, 30, 12, 8)), P(0)),
    (Mesh((3, 2)), P(1), Mesh((4, 2), ranks=range(6, 14)), P()),
]


@pytest.mark.parametrize("node_size", [1, 2, 4, 8])
@pytest.mark.parametrize("case", COPIES)
@pytest.mark.parametrize("shape", [(48,), (17,), (12, 5)])
def test_the_nearest_class_serves_and_shares_the_load(
    case: tuple[Mesh, P, Mesh, P], shape: tuple[int, ...], node_size: int
) -> None:
    """Every part comes from a holder as near as any; holders of one class differ by a part."""
    left, src, right, dst = case
    step = Transfer(Layout(left, shape, src), Layout(right, shape, dst), node_size=node_size)
    interpret(Plan(step.src, step.dst, (step,)))
    loads: dict[tuple, Counter[int]] = defaultdict(Counter)
    parts: dict[tuple, int] = Counter()
    for holder, taker, box in served(step):
        near = distance(holder, taker, node_size)
        everyone = holders_of(step, box)
        assert near == min(distance(other, taker, node_size) for other in everyone)
        if near == 0:
            continue
        node = taker // node_size if near == 1 else None
        able = tuple(other for other in everyone if near == 2 or other // node_size == node)
        key = (near, node, step.src.box(holder), able)
        loads[key][holder] += volume(box)
        parts[key] = max(parts[key], volume(box))
    for key, load in loads.items():
        each = [load[holder] for holder in key[-1]]
        assert max(each) - min(each) < 2 * parts[key], (key, load)


def test_one_mesh_takes_from_the_holder_that_differs_in_fewest_axes() -> None:
    mesh = Mesh((2, 3, 2))
    found = layouts(mesh, (5, 4), ())
    moves = [
        step for src, dst in some(list(itertools.product(found, found)), 300)
        for step in plan(src, dst).steps if isinstance(step, (Exchange, AllGather))
    ]
    assert len(moves) > 100
    for step, place in itertools.product(moves, range(mesh.size())):
        at = mesh.coordinate(place)
        for peer, box in step.receives(at):
            able = [mesh.coordinate(rank) for rank in holders_of(step, box)]
            differing = [sum(a != b for a, b in zip(at, other)) for other in able]
            assert volume(box) == 0 or able[differing.index(min(differing))] == peer
            assert volume(box) == 0 or differing.count(min(differing)) == 1
