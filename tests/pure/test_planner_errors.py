"""Pairs that the table lacks are refused with all they offend; wrong plans are found out."""

from __future__ import annotations

import pytest

from weft.core import Layout, Mesh, P
from weft.errors import LayoutError
from weft.planner import (
    AllGather,
    AllReduce,
    Exchange,
    Plan,
    PlanError,
    ReduceScatter,
    Slice,
    Step,
    Term,
    interpret,
    plan,
)

MESH = Mesh({"a": 2, "b": 2})


def on(spec: P, shape: tuple[int, ...] = (4, 2)) -> Layout:
    return Layout(MESH, shape, spec)


def test_a_row_that_the_table_lacks_is_named() -> None:
    with pytest.raises(LayoutError) as caught:
        plan(on(P("a")), on(P(partial={"a": "max", "b": "max"})))
    assert str(caught.value) == (
        "plan(src, dst): 1 axes would become partial by a row that the table of transitions "
        "lacks, from [4@a, 2] to [4, 2] partial(max@a, max@b).\n"
        "  Rule: S becomes P(sum) only; I becomes P of and, band, bor, max, min, or, product, "
        "sum; P keeps its kind, or is reduced and follows I.\n"
        "  Offenders: S(0) -> P(max) on axis 'a'\n"
        "  Fix: leave the axis sharded or replicated in the target"
    )


@pytest.mark.parametrize("kind", ["avg", "bxor"])
@pytest.mark.parametrize("src", [P(), P("a"), P(partial={"a": "sum"})])
def test_kinds_that_nothing_becomes(kind: str, src: P) -> None:
    with pytest.raises(LayoutError, match=rf"-> P\({kind}\) on axis 'a'"):
        plan(on(src), on(P(partial={"a": kind})))


def test_other_shapes_and_meshes_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"src has global shape \(4, 2\), dst \(2, 4\)"):
        plan(on(P()), on(P(), (2, 4)))
    other = Layout(Mesh({"a": 2, "b": 2}, ranks=(3, 2, 1, 0)), (4, 2), P())
    with pytest.raises(LayoutError, match="on the same mesh"):
        plan(on(P()), other)


WRONG: list[tuple[P, P, list[Step]]] = [
    (P("a"), P(), [Slice(on(P("a")), on(P()))]),  # lacks data
    (P(("a", "b")), P(), [AllGather(on(P(("a", "b"))), on(P()), (1,))]),  # too small a group
    (P(("a", "b")), P(("b", "a")), [Exchange(on(P(("a", "b"))), on(P(("b", "a"))), (0,))]),
    (P("a"), P(), []),  # does not arrive
    (P("a"), P("b"), [AllGather(on(P("b")), on(P()), (1,)), Slice(on(P()), on(P("b")))]),
    (P(partial={"a": "sum"}), P(), [Slice(on(P(partial={"a": "sum"})), on(P()))]),
    (P(partial={"a": "sum"}), P(), [AllReduce(on(P(partial={"a": "sum"})), on(P()), (0, 1))]),
    (P("b", partial={"a": "sum"}), P("a"),
     [ReduceScatter(on(P("b", partial={"a": "sum"})), on(P("a")), (0,))]),
    (P("a"), P(partial={"b": "sum"}), [Term(on(P("a")), on(P(partial={"b": "sum"})), (1,))]),
    (P("a"), P(partial={"a": "max"}), [Term(on(P("a")), on(P(partial={"a": "max"})), (0,))]),
]


@pytest.mark.parametrize("src, dst, steps", WRONG)
def test_a_wrong_plan_is_found_out(src: P, dst: P, steps: list[Step]) -> None:
    with pytest.raises((PlanError, KeyError)):
        interpret(Plan(on(src), on(dst), tuple(steps)))


def test_a_reduction_by_another_kind_is_found_out() -> None:
    """A sum that is taken as a maximum would lose all terms but one."""
    summed, full = on(P(partial={"a": "sum"})), on(P())
    as_maximum = AllReduce(on(P(partial={"a": "max"})), full, (0,))
    with pytest.raises(PlanError, match="follows"):
        interpret(Plan(summed, full, (as_maximum,)))
