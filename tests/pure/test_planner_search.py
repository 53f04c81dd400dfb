"""Every pair of small layouts: the plan is right, minimal, and says what it moves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from tests.interpret import interpret
from tests.naive import naive
from tests.transitions import MESHES, SHAPES, layouts, missing, some
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
    Slice,
    plan,
)
from weft.planner.geometry import largest, volume
from weft.planner.search import family

BYTES = Links(near=Link(0, 1e-9), far=Link(0, 1e-9))
"""A network without latency: the fewest bytes win."""


SIZES = (0, 1, 2, 3, 4, 5)


def pairs(mesh: Mesh, shapes: Iterable[tuple[int, ...]]) -> list[tuple[Layout, Layout]]:
    """Every pair that the table of transitions has (a shard becomes a term of a sum only)."""
    found = [layouts(mesh, shape) for shape in shapes]
    return [pair for its in found for pair in itertools.product(its, its)]


def judge(src: Layout, dst: Layout) -> None:
    """A plan and the naive one give every rank the same; nothing moves that need not."""
    found = plan(src, dst, 8)
    world, reference = interpret(found), interpret(naive(src, dst))
    assert dst.is_partial or world == reference, str(found)
    ranks = range(src.mesh.size())
    received = {rank: found.bytes_received(rank) for rank in ranks}
    if src.is_partial or dst.is_partial:
        rounded = len(found.steps) * src.mesh.size()  # an all-reduce may round up on each rank
        assert found.total_bytes <= sum(received.values()) <= found.total_bytes + rounded
        assert found.lower_bound <= found.total_bytes <= naive(src, dst, 8).total_bytes
    else:
        assert received == {rank: 8 * count for rank, count in missing(src, dst).items()}
        assert found.total_bytes == found.lower_bound == sum(received.values()), str(found)
        assert sum(isinstance(step, (Exchange, AllGather)) for step in found.steps) <= 1
    for step in found.steps:
        for rank in ranks:
            box, *ends = (volume(its.box(rank)) for its in (step.dst, src, dst))
            assert box <= max(ends), str(found)


@pytest.mark.parametrize("sizes", [(2,), (3,), (1, 2), (2, 2), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("ndim", [0, 1, 2])
def test_every_plan_gives_what_the_naive_one_gives(sizes: tuple[int, ...], ndim: int) -> None:
    """All pairs of small layouts; of two dims on two axes a sample, all of them with effort 80."""
    shapes = itertools.product(SIZES, repeat=ndim)
    for src, dst in some(pairs(Mesh(sizes), shapes), 600):
        judge(src, dst)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 3, 2), (4, 2), (5, 3)])
@pytest.mark.parametrize("shape", [(7,), (12,), (5, 6), (8, 8), (2, 3, 4)])
def test_plans_on_larger_meshes(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    found = layouts(Mesh(sizes), shape)
    for src, dst in some(list(itertools.product(found, found)), 20):
        judge(src, dst)


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_transposed_plans_lead_back(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    for src, dst in pairs(Mesh(sizes), [shape]):
        back = plan(src, dst).transpose()
        none = (None,) * len(sizes)
        assert back.src == dst.replace(cuts=dst.cuts, partial=none)
        assert back.dst == src.replace(cuts=src.cuts, partial=none)
        interpret(back)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (2, 2, 2)])
def test_every_member_of_a_family_is_a_plan(sizes: tuple[int, ...]) -> None:
    """Not only the one that is chosen; and none holds more than source and target."""
    found = layouts(Mesh(sizes), (5, 4))
    for src, dst in some(list(itertools.product(found, found)), 150):
        for steps in family(src, dst, 8):
            interpret(Plan(src, dst, steps))
            for step in steps:
                assert largest(step.dst) <= max(largest(src), largest(dst)), str(step)


@pytest.mark.parametrize("kind", ["max", "min", "product", "and", "or", "band", "bor"])
def test_kinds_that_replicated_values_take(kind: str) -> None:
    mesh = Mesh((2, 2))
    for src, dst in itertools.product(layouts(mesh, (3, 2), (kind,)), repeat=2):
        if any(after and isinstance(src.on(axis), int) for axis, after in enumerate(dst.partial)):
            with pytest.raises(LayoutError, match="row"):
                plan(src, dst)
        else:
            interpret(plan(src, dst))


@pytest.mark.parametrize("kinds", [("avg",), ("avg", "sum"), ("bxor",)])
def test_kinds_that_only_a_source_can_have(kinds: tuple[str, ...]) -> None:
    mesh = Mesh((2, 2))
    for src in layouts(mesh, (3, 2), kinds):
        for dst in layouts(mesh, (3, 2), ()):
            interpret(plan(src, dst))
            interpret(naive(src, dst))
        interpret(plan(src, src))


def test_partial_terms_that_stay_move_as_they_are() -> None:
    mesh = Mesh((2, 2))
    for kind in ("sum", "avg", "max", "bxor"):
        src = Layout(mesh, (4, 6), P(0, partial={1: kind}))
        dst = Layout(mesh, (4, 6), P(None, 0, partial={1: kind}))
        found = plan(src, dst)
        interpret(found)
        assert [(type(step), step.axes) for step in found.steps] == [(Exchange, (0,))]


@pytest.mark.parametrize("before, after", [("max", "sum"), ("sum", "max"), ("bxor", "product")])
def test_another_kind_is_reduced_first(before: str, after: str) -> None:
    mesh = Mesh((2, 2))
    src = Layout(mesh, (4,), P(0, partial={1: before}))
    found = plan(src, Layout(mesh, (4,), P(0, partial={1: after})))
    interpret(found)
    reduction = ReduceScatter if after == "sum" else AllReduce  # a shard can become a sum only
    assert [type(step) for step in found.steps] == [reduction, MakePartial]


PEERS = [
    # source, target, step: the rows of a comparison with other systems, each the minimum here
    (P("a", "b"), P("b", "a"), Exchange), (P(("a", "b")), P(None, ("a", "b")), Exchange),
    (P("a"), P("b"), Exchange), (P("a", "b"), P("b"), Exchange),
    (P("b"), P(("a", "b")), Exchange), (P("a"), P(), AllGather),
]


@pytest.mark.parametrize("shape", [(16, 16), (17, 23), (3, 2)])
@pytest.mark.parametrize("src, dst, kind", PEERS)
def test_the_peers_rows_are_one_step_and_minimal(
    src: P, dst: P, kind: type, shape: tuple[int, int]
) -> None:
    mesh = Mesh({"a": 2, "b": 4})
    found = plan(Layout(mesh, shape, src), Layout(mesh, shape, dst))
    assert [type(step) for step in found.steps] == [kind]
    lacking = {rank: 4 * count for rank, count in missing(found.src, found.dst).items()}
    assert {rank: found.bytes_received(rank) for rank in range(8)} == lacking
    assert found.total_bytes / sum(lacking.values()) == 1.0


def test_the_peers_row_on_one_axis() -> None:
    mesh = Mesh((8,))
    for shape, nbytes in (((16, 16), 4 * 14 * 16), ((64, 64), 4 * 56 * 64)):
        found = plan(Layout(mesh, shape, P(0)), Layout(mesh, shape, P(None, 0)))
        assert [type(step) for step in found.steps] == [Exchange]
        assert found.total_bytes == found.lower_bound == nbytes


STEPS = [
    # source, target, steps with their axes
    (P("a"), P(), [(AllGather, (0,))]),
    (P(), P(("a", "b")), [(Slice, ())]),
    (P(("a", "b")), P("a"), [(AllGather, (1,))]),
    (P(("a", "b")), P("b"), [(Exchange, (0, 1))]),
    (P(("a", "b")), P(("b", "a")), [(Exchange, (0, 1))]),
    (P("a"), P(None, "a"), [(Exchange, (0,))]),
    (P("a"), P(None, "b"), [(Slice, ()), (AllGather, (0,))]),
    (P(partial={"a": "sum", "b": "sum"}), P(), [(AllReduce, (0, 1))]),
    (P(partial={"a": "sum", "b": "sum"}), P("b", "a"), [(ReduceScatter, (0, 1))]),
    (P(partial={"a": "sum", "b": "sum"}), P("a"), [(ReduceScatter, (0,)), (AllReduce, (1,))]),
    (P(partial={"a": "sum"}), P(None, "b"), [(Slice, ()), (AllReduce, (0,))]),
    (P(partial={"a": "sum"}), P(("a", "b")), [(ReduceScatter, (0,))]),
    (P("b", partial={"a": "sum"}), P(), [(AllReduce, (0,)), (AllGather, (1,))]),
    (P("b", partial={"a": "sum"}), P("a", "b"), [(ReduceScatter, (0,)), (Exchange, (0, 1))]),
    (P("a"), P(partial={"a": "sum"}), [(MakePartial, (0,))]),
    (P("a"), P("b", partial={"a": "sum"}), [(MakePartial, (0,))]),
    (P("a", "b"), P("b", partial={"a": "sum"}), [(Exchange, (0, 1)), (MakePartial, (0,))]),
    (P(), P(partial={"b": "sum"}), [(MakePartial, (1,))]),
    (P("a"), P("a"), []),
]


@pytest.mark.parametrize("src, dst, steps", STEPS)
def test_which_steps_a_pair_takes(src: P, dst: P, steps: list[tuple[type, object]]) -> None:
    mesh = Mesh({"a": 2, "b": 4})
    found = plan(Layout(mesh, (16, 24), src), Layout(mesh, (16, 24), dst), links=BYTES)
    assert [(type(step), step.axes) for step in found.steps] == steps, str(found)
    assert found.total_bytes == found.lower_bound


def test_axes_of_size_one_need_no_step() -> None:
    mesh = Mesh({"a": 1, "b": 2})
    for src in (P("a"), P(partial={"a": "max"}), P(("a", "b"))):
        dst = P("b") if "b" in str(src) else P()
        assert plan(Layout(mesh, (4,), src), Layout(mesh, (4,), dst)).steps == ()


def test_a_row_of_one_rank_is_cut_anew_where_it_is() -> None:
    mesh = Mesh({"a": 2, "b": 2})
    row = Layout(mesh, (1, 6), P(None, ("a", "b")), sizes={1: (0, 6, 0, 0)})
    column = Layout(mesh, (1, 6), P(("a", "b")), sizes={0: (0, 1, 0, 0)})
    for src, dst in ((row, column), (column, row)):
        judge(src, dst)
        (step,) = plan(src, dst).steps
        assert type(step) is Slice
    assert type(plan(row, Layout(mesh, (1, 6), P("a"))).steps[0]) is not Slice


def test_an_exchange_is_over_no_axis_whose_cuts_agree() -> None:
    mesh = Mesh((2, 2))
    src = Layout(mesh, (8,), P((0, 1)))
    inner = Layout(mesh, (8,), P((0, 1)), sizes={0: (1, 3, 2, 2)})
    outer = Layout(mesh, (8,), P((0, 1)), sizes={0: (1, 2, 3, 2)})
    assert plan(src, inner).steps == (Exchange(src, inner, (1,)),)
    assert plan(src, outer).steps == (Exchange(src, outer, (0, 1)),)


def test_equal_arguments_give_the_same_plan() -> None:
    def layout(spec: P) -> Layout:
        return Layout(Mesh((2, 2)), (4, 4), spec)

    assert plan(layout(P(0)), layout(P(1))) is plan(layout(P(0)), layout(P(1)))


def test_what_one_rank_of_a_large_mesh_receives_does_not_list_the_mesh() -> None:
    mesh = Mesh({"a": 1000, "b": 1000})
    src, dst = (Layout(mesh, (1000, 1000), spec) for spec in (P("a", "b"), P("b", "a")))
    found = plan(src, dst)
    assert found.bytes_received(1) == 4 and found.bytes_received(0) == 0
    (step,) = found.steps
    assert isinstance(step, Exchange)
    assert step.receives((0, 1)) == [((1, 0), ((1, 2), (0, 1)))]
    assert step.sends((0, 1)) == [((1, 0), ((0, 1), (1, 2)))]


def test_bytes_go_by_device_ids() -> None:
    mesh = Mesh({"a": 2}, ranks=(7, 3))
    found = plan(Layout(mesh, (3,), P("a")), Layout(mesh, (3,), P()))
    assert (found.bytes_received(7), found.bytes_received(3)) == (4, 8)
    with pytest.raises(LayoutError, match=r"rank 0 is not among the 2 devices"):
        found.bytes_received(0)


def test_peak_is_both_sides_of_the_largest_step() -> None:
    mesh = Mesh({"a": 2, "b": 4})
    found = plan(Layout(mesh, (16, 9), P("a")), Layout(mesh, (16, 9), P()))
    assert found.peak_elements == 8 * 9 + 16 * 9
    assert plan(found.src, found.src).peak_elements == 8 * 9


def test_a_plan_is_a_value_with_slots() -> None:
    layout = Layout(Mesh((2,)), (4,), P(0))
    found = plan(layout, layout)
    assert isinstance(found, Plan) and not hasattr(found, "__dict__")
    with pytest.raises(AttributeError):
        found.steps = ()  # type: ignore[misc]
