"""Every pair of small layouts: the plan is right, minimal, and says what it moves."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.transitions import MESHES, SHAPES, layouts
from weft.core import Layout, Mesh, P
from weft.errors import LayoutError
from weft.planner import (
    AllGather,
    AllReduce,
    Exchange,
    Plan,
    ReduceScatter,
    Slice,
    Term,
    interpret,
    naive,
    plan,
)


def pairs(mesh: Mesh, shape: tuple[int, ...]) -> list[tuple[Layout, Layout]]:
    """Every pair that the table of transitions has (a shard becomes a term of a sum only)."""
    found = layouts(mesh, shape)
    return list(itertools.product(found, found))


def missing(src: Layout, dst: Layout, itemsize: int) -> list[int]:
    """Bytes that each rank lacks, element by element."""
    def elements(layout: Layout, position: int) -> set[tuple[int, ...]]:
        return set(itertools.product(*(range(*pair) for pair in layout.box(position))))

    return [
        itemsize * len(elements(dst, position) - elements(src, position))
        for position in range(src.mesh.size())
    ]


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_plan_denotes_its_target(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    for src, dst in pairs(Mesh(sizes), shape):
        interpret(plan(src, dst))


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("shape", (*SHAPES[:5], (3, 2)))
def test_every_naive_plan_denotes_its_target(
    sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    for src, dst in pairs(Mesh(sizes), shape):
        interpret(naive(src, dst))


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_without_partial_are_those_that_are_missing(
    sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    mesh = Mesh(sizes)
    for src, dst in itertools.product(layouts(mesh, shape, kinds=()), repeat=2):
        found = plan(src, dst, 8)
        lacking = missing(src, dst, 8)
        assert [found.bytes_received(rank) for rank in range(mesh.size())] == lacking, str(found)
        assert found.total_bytes == found.lower_bound == sum(lacking), str(found)
        assert sum(isinstance(step, (Exchange, AllGather)) for step in found.steps) <= 1


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_with_partial_add_up_and_never_exceed_naive(
    sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    mesh = Mesh(sizes)
    for src, dst in pairs(mesh, shape):
        found = plan(src, dst)
        each = sum(found.bytes_received(rank) for rank in range(mesh.size()))
        rounded = sum(isinstance(step, AllReduce) for step in found.steps) * mesh.size()
        assert found.total_bytes <= each <= found.total_bytes + rounded
        assert found.total_bytes <= naive(src, dst).total_bytes, str(found)
        assert found.lower_bound == found.total_bytes


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_transposed_plans_lead_back(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    for src, dst in pairs(Mesh(sizes), shape):
        back = plan(src, dst).transpose()
        none = (None,) * len(sizes)
        assert back.src == dst.replace(cuts=dst.cuts, partial=none)
        assert back.dst == src.replace(cuts=src.cuts, partial=none)
        interpret(back)


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
    assert [type(step) for step in found.steps] == [AllReduce, Term]


PEERS = [
    (P("a", "b"), P("b", "a")), (P(("a", "b")), P(None, ("a", "b"))), (P("a"), P("b")),
    (P("a", "b"), P("b")), (P("b"), P(("a", "b"))),
]


@pytest.mark.parametrize("src, dst", PEERS)
def test_the_peers_rows_are_one_exchange(src: P, dst: P) -> None:
    mesh = Mesh({"a": 2, "b": 4})
    found = plan(Layout(mesh, (16, 16), src), Layout(mesh, (16, 16), dst))
    interpret(found)
    assert [type(step) for step in found.steps] == [Exchange]
    assert found.total_bytes == sum(missing(found.src, found.dst, 4))


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
    (P("a"), P(partial={"a": "sum"}), [(Term, (0,))]),
    (P("a"), P("b", partial={"a": "sum"}), [(Term, (0,))]),
    (P("a", "b"), P("b", partial={"a": "sum"}), [(Exchange, (0, 1)), (Term, (0,))]),
    (P(), P(partial={"b": "sum"}), [(Term, (1,))]),
    (P("a"), P("a"), []),
]


@pytest.mark.parametrize("src, dst, steps", STEPS)
def test_which_steps_a_pair_takes(src: P, dst: P, steps: list[tuple[type, object]]) -> None:
    mesh = Mesh({"a": 2, "b": 4})
    found = plan(Layout(mesh, (16, 24), src), Layout(mesh, (16, 24), dst))
    assert [(type(step), step.axes) for step in found.steps] == steps, str(found)


def test_axes_of_size_one_need_no_step() -> None:
    mesh = Mesh({"a": 1, "b": 2})
    for src in (P("a"), P(partial={"a": "max"}), P(("a", "b"))):
        dst = P("b") if "b" in str(src) else P()
        assert plan(Layout(mesh, (4,), src), Layout(mesh, (4,), dst)).steps == ()


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


def test_a_plan_prints_its_steps_and_bytes() -> None:
    mesh = Mesh({"dp": 2, "tp": 4})
    src = Layout(mesh, (16, 8), P("dp", partial={"tp": "sum"}))
    assert str(plan(src, Layout(mesh, (16, 8), P(None, "tp")))) == (
        "[16@dp, 8] partial(sum@tp) -> [16, 8@tp] on Mesh(dp=2, tp=4)\n"
        "  2048 bytes received by 8 ranks, 1.00x the minimum; at most 80 elements at once\n"
        "  1. ReduceScatter over tp: [16@dp, 8] partial(sum@tp) -> [16@dp, 8@tp], 1536 bytes\n"
        "  2. AllGather over dp: [16@dp, 8@tp] -> [16, 8@tp], 512 bytes"
    )
    assert str(plan(src, src)).endswith("\n  nothing to do")


def test_time_grows_with_bytes_and_steps() -> None:
    mesh = Mesh((2, 2))
    small, large = (
        plan(Layout(mesh, (n, n), P(0)), Layout(mesh, (n, n), P(1))).seconds for n in (4, 4096)
    )
    assert plan(Layout(mesh, (4, 4), P(0)), Layout(mesh, (4, 4), P(0))).seconds == 0
    assert 0 < small < large
    assert math.isclose(large - small, (4096**2 - 4**2) * 4 / 2 / 2 * 1e-9, rel_tol=1e-6)


def test_a_plan_is_a_value_with_slots() -> None:
    layout = Layout(Mesh((2,)), (4,), P(0))
    found = plan(layout, layout)
    assert isinstance(found, Plan) and not hasattr(found, "__dict__")
    with pytest.raises(AttributeError):
        found.steps = ()  # type: ignore[misc]
