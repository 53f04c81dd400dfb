"""Pairs that the table lacks are refused with all they offend; wrong plans are found out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.interpret import PlanError, interpret
from weft.core import Layout, Mesh, P
from weft.errors import LayoutError, MeshError, ShardTypeError
from weft.planner import (
    AllGather,
    AllReduce,
    Exchange,
    MakePartial,
    Plan,
    ReduceScatter,
    Slice,
    Step,
    Transfer,
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


def test_other_shapes_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"src has global shape \(4, 2\), dst \(2, 4\)"):
        plan(on(P()), on(P(), (2, 4)))


OTHER = Mesh({"b": 2, "c": 3}, ranks=range(4, 10))


def test_a_row_that_is_lacking_between_meshes_is_named() -> None:
    """What comes over is a value; a mean of terms comes over as terms or not at all."""
    src = on(P(partial={"b": "avg"}))
    with pytest.raises(LayoutError) as caught:
        plan(src, Layout(OTHER, (4, 2), P(partial={"c": "avg"})))
    assert str(caught.value) == (
        "plan(src, dst): 1 axes would become partial by a row that the table of transitions "
        "lacks, from [4, 2] partial(avg@b) to [4, 2] partial(avg@c).\n"
        "  Rule: S becomes P(sum) only; I becomes P of and, band, bor, max, min, or, product, "
        "sum; P keeps its kind, or is reduced and follows I.\n"
        "  Offenders: I -> P(avg) on axis 'c'\n"
        "  Fix: leave the axis sharded or replicated in the target"
    )
    interpret(plan(src, Layout(OTHER, (4, 2), P(partial={"b": "avg"}))))


def test_kinds_that_do_not_mix_are_refused() -> None:
    mixed = Layout.make(MESH, (4, 2), ((), ()), None, ("max", "sum"))
    with pytest.raises(LayoutError) as caught:
        plan(on(P()), mixed)
    assert str(caught.value) == (
        "plan(src, dst): 1 of 2 layouts wait for reductions of kinds that do not mix.\n"
        "  Rule: the partial axes of a layout have one kind; sum and avg may stand together.\n"
        "  Offenders: dst [4, 2] partial(max@a, sum@b): max, sum\n"
        "  Fix: reduce one kind first, by a redistribute of its own"
    )


WRONG_ARGUMENTS = [
    ({"itemsize": 0}, "plan(itemsize): itemsize is 0."),
    ({"itemsize": 2.0}, "plan(itemsize): itemsize is 2.0."),
    ({"itemsize": 4, "dtype": "int64"}, "plan(itemsize, dtype): itemsize is 4, int64 has 8 bytes."),
    ({"dtype": "quad"}, "plan(dtype): 'quad' names no dtype."),
    ({"dtype": "f4"}, "plan(dtype): 'f4' names no dtype."),
    ({"links": "infiniband"}, "plan(links): 'infiniband' is no network."),
]


@pytest.mark.parametrize("arguments, facts", WRONG_ARGUMENTS)
def test_arguments_that_say_nothing(arguments: dict[str, Any], facts: str) -> None:
    with pytest.raises((ShardTypeError, LayoutError)) as caught:
        plan(on(P()), on(P("a")), **arguments)
    lines = str(caught.value).splitlines()
    assert lines[0] == facts
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["Rule", "Offenders", "Fix"]


def test_what_is_no_layout() -> None:
    text: Any = "a"
    with pytest.raises(ShardTypeError) as caught:
        plan(on(P()), text)
    assert str(caught.value) == (
        "plan(src, dst): 1 of 2 arguments are no layouts.\n"
        "  Rule: a plan leads from one weft.Layout to another, or from a tensor or layout to "
        "placements.\n"
        "  Offenders: 'a'\n"
        "  Fix: plan(Layout(mesh, shape, P('dp')), Layout(mesh, shape, P(None, 'dp')))"
    )


def test_placements_are_on_the_mesh_of_the_source() -> None:
    for given in (P("a"), on(P("a")).placements):
        assert plan(on(P("b")), given) is plan(on(P("b")), on(P("a")))
    with pytest.raises(MeshError, match=r"^plan\(dst=P\('c'\)\): 'c' is no axis of"):
        plan(on(P()), P("c"))
    with pytest.raises(ShardTypeError, match=r"^plan\(from=\): .*\n.*it takes src, dst, itemsize"):
        plan(on(P()), on(P()), **{"from": 1})  # type: ignore[arg-type]


def test_a_kind_that_the_dtype_does_not_carry() -> None:
    with pytest.raises(LayoutError, match="1 partial axes cannot carry int64"):
        plan(on(P(partial={"a": "avg"})), on(P()), dtype="int64")


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
    (P("a"), P(partial={"b": "sum"}), [MakePartial(on(P("a")), on(P(partial={"b": "sum"})), (1,))]),
    (P("a"), P(partial={"a": "max"}), [MakePartial(on(P("a")), on(P(partial={"a": "max"})), (0,))]),
]


AWAY = Layout(Mesh((2,), ranks=(4, 5)), (4, 2), P())
BACK = Layout(Mesh((2,), ranks=(1, 4)), (4, 2), P(0))
MEANS = Layout(Mesh({"a": 2}, ranks=(4, 5)), (4, 2), P(partial={"a": "avg"}))


class Crossed(Transfer):
    """A transfer in which the devices of the target take each other's parts."""

    __slots__ = ()

    def receives(self, rank: int) -> list[tuple[int, Any]]:
        return Transfer(self.src, self.dst).receives({1: 4, 4: 1}[rank])


class Greedy(Transfer):
    """A transfer in which a device takes what it holds itself."""

    __slots__ = ()

    def receives(self, rank: int) -> list[tuple[int, Any]]:
        return [(2, box) for _, box in Transfer(self.src, self.dst).receives(rank)]

    def sends(self, rank: int) -> list[tuple[int, Any]]:
        boxes = [(taker, box) for taker in (1, 4) for _, box in self.receives(taker)]
        return boxes if rank == 2 else []


WRONG_TRANSFERS: list[tuple[Layout, Layout, list[Step]]] = [
    (on(P("a")), AWAY, []),  # stays on its mesh
    (on(P("a")), AWAY, [Exchange(on(P("a")), AWAY, (0,))]),  # what another step claims
    (on(P(partial={"a": "sum"})), AWAY, [Transfer(on(P(partial={"a": "sum"})), AWAY)]),
    (on(P(partial={"a": "sum"})), MEANS, [Transfer(on(P(partial={"a": "sum"})), MEANS)]),
    (on(P("a")), BACK, [Crossed(on(P("a")), BACK)]),
    (on(P()), BACK, [Greedy(on(P()), BACK)]),
]


@pytest.mark.parametrize("src, dst, steps", WRONG_TRANSFERS)
def test_a_wrong_crossing_is_found_out(src: Layout, dst: Layout, steps: list[Step]) -> None:
    with pytest.raises((PlanError, KeyError)):
        interpret(Plan(src, dst, tuple(steps)))


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
