"""The tables of transitions in docs/semantics.md say what the code does."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft import Layout, LayoutError, Mesh, P
from weft.planner import AllGather, AllReduce, Exchange, MakePartial, ReduceScatter, Slice
from weft.transport import Transition, traffic

PAGE = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text()
HEAD = "| from -> to | forward | backward | received forward | received backward |\n"
SHAPE = (7, 6)  # rows that nothing divides; elements that every size does
ITEMSIZE = 4

COLLECTIVES = {
    "all-gather": "AllGather", "reduce-scatter": "ReduceScatter", "all-reduce": "AllReduce",
    "exchange": "Exchange",
}
LOCAL = ("slice", "zero-pad", "one keeps", "nothing")
STEPS = {
    AllGather: "all-gather", ReduceScatter: "reduce-scatter", AllReduce: "all-reduce",
    Exchange: "exchange", Slice: "slice",
}


def rows(page: str) -> list[tuple[str, ...]]:
    found = []
    for table in page.split(HEAD)[1:]:
        lines = table.split("\n\n")[0].splitlines()[1:]
        found += [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines]
    return found


ROWS = rows(PAGE)


def side(mesh: Any, text: str) -> tuple[Layout, frozenset[int]]:
    """The layout that one side of a row means on a mesh of one axis, and the axes that are R."""
    if text in ("I", "R"):
        return Layout(mesh, SHAPE), frozenset({0} if text == "R" else ())
    if text == "S, other cuts":
        return Layout(mesh, SHAPE, P("a"), sizes={0: (1, *[0] * (mesh.size() - 2), 6)}), frozenset()
    letter, inner = re.fullmatch(r"([SP])(?:\((\w+)\))?", text).groups()  # type: ignore[union-attr]
    spec = P(partial={"a": inner or "sum"}) if letter == "P" else P(*[None] * int(inner or 0), "a")
    return Layout(mesh, SHAPE, spec), frozenset()


def sides(mesh: Any, row: str) -> tuple[tuple[Layout, frozenset[int]], ...]:
    src, dst = row.split(" -> ")
    return side(mesh, src), side(mesh, dst)


def word(plan: Any) -> str:
    """What the page calls the one step of a plan."""
    if not plan.steps:
        return "nothing"
    (step,) = plan.steps
    if type(step) is not MakePartial:
        return STEPS[type(step)]
    if any(step.src.dims):
        return "zero-pad"
    return "nothing" if step.dst.partial[0] == "max" else "one keeps"


def nbytes(formula: str, src: Layout, dst: Layout, rank: int) -> int:
    """A cell of bytes, for one rank, from shapes and boxes alone."""
    if formula == "lacks":
        held, wanted = src.box(rank), dst.box(rank)
        both = math.prod(
            max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(held, wanted)
        )
        return ITEMSIZE * (math.prod(b - a for a, b in wanted) - both)
    cut = src if any(src.dims) else dst
    names = {"n": ITEMSIZE * math.prod(SHAPE), "g": src.mesh.size()}
    names["own"] = ITEMSIZE * math.prod(cut.local_shape(rank))
    python = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    return round(eval(python, {}, names))


def test_the_tables_are_found() -> None:
    assert len(ROWS) == len(re.findall(r"^\| [SIRP]\S* -> ", PAGE, re.MULTILINE)) > 20
    assert {row[1] for row in ROWS} == {*COLLECTIVES, *LOCAL, "refused"}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("row", [row for row in ROWS if row[1] != "refused"], ids=lambda r: r[0])
def test_what_a_transition_moves(row: tuple[str, ...], size: int) -> None:
    def on_rank(mesh: Any) -> Any:
        (src, is_r), (dst, to_r) = sides(mesh.abstract, row[0])
        move = Transition(mesh, src, dst, src_varying=is_r, dst_varying=to_r)
        assert mesh.here is not None
        x = torch.ones(src.local_shape_at(mesh.here), requires_grad=True)
        with traffic.record() as log:
            y = move(x)
            (y.clone() * y).sum().backward()
        return [
            [(event.collective, event.nbytes) for event in log.events if event.direction == way]
            for way in ("forward", "backward")
        ]

    (src, _), (dst, _) = sides(Mesh({"a": size}), row[0])
    for rank, ways in enumerate(weft.testing.run(on_rank, mesh={"a": size})):
        for moved, name, formula, ends in zip(ways, row[1:3], row[3:], ((src, dst), (dst, src))):
            due = nbytes(formula, *ends, rank)
            assert moved == ([] if name in LOCAL else [(COLLECTIVES[name], due)])
            assert name not in LOCAL or due == 0


@pytest.mark.parametrize("row", [row for row in ROWS if row[1] != "refused"], ids=lambda r: r[0])
def test_what_the_planner_finds(row: tuple[str, ...]) -> None:
    mesh = Mesh({"a": 3})
    (src, is_r), (dst, to_r) = sides(mesh, row[0])
    plan = weft.plan(src, dst, itemsize=ITEMSIZE)
    if "P(product) ->" in row[0]:  # with a gradient, terms are gathered and multiplied
        assert word(plan) in ("all-reduce", "reduce-scatter")
        return
    assert word(plan) == row[1]
    assert [plan.bytes_received(rank) for rank in range(3)] == [
        nbytes(row[3], src, dst, rank) for rank in range(3)
    ]
    if "product" in row[0]:  # all-reduces the one gradient that is not masked away
        return
    back = weft.plan(_dual(dst, to_r), _dual(src, is_r), itemsize=ITEMSIZE)
    assert word(back) == row[2]


def _dual(layout: Layout, varying: frozenset[int]) -> Layout:
    return layout.replace(cuts=layout.cuts, partial=["sum" if 0 in varying else None])


@pytest.mark.parametrize("row", [row for row in ROWS if row[1] == "refused"], ids=lambda r: r[0])
def test_what_is_refused(row: tuple[str, ...]) -> None:
    (src, _), (dst, _) = sides(Mesh({"a": 3}), row[0])
    with pytest.raises(LayoutError, match="the table of transitions lacks"):
        weft.plan(src, dst)
