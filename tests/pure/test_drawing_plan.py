"""Plans drawn, and as one rank sees them: what it takes is what others give."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import assume, given, settings

from tests.pure.test_core_layout import layouts
from weft.core import Layout, Mesh, P
from weft.drawing import show
from weft.drawing.one_rank import rank_lines
from weft.errors import LayoutError
from weft.planner import Plan, plan

MESH = Mesh({"dp": 2, "tp": 4})
SRC = Layout(MESH, (1024, 4096), P("dp", "tp"))
DST = Layout(MESH, (1024, 4096), P("tp", "dp"))


def test_both_sides_stand_side_by_side_where_they_fit():
    made = plan(SRC, DST)
    drawing = show(made, width=110)
    assert drawing[len(str(made)):] == """

from [1024@dp, 4096@tp]                                  to [1024@tp, 4096@dp]

     0         1024       2048       3072      4096           0                    2048                 4096
   0 ┌──────────┬──────────┬──────────┬──────────┐          0 ┌─────────────────────┬─────────────────────┐
     │  rank 0  │  rank 1  │  rank 2  │  rank 3  │            │        rank 0       │        rank 4       │
 512 ├──────────┼──────────┼──────────┼──────────┤        256 ├─────────────────────┼─────────────────────┤
     │  rank 4  │  rank 5  │  rank 6  │  rank 7  │            │        rank 1       │        rank 5       │
1024 └──────────┴──────────┴──────────┴──────────┘        512 ├─────────────────────┼─────────────────────┤
                                                              │        rank 2       │        rank 6       │
rows     dim 0: 1024 over dp, 2 shards of 512             768 ├─────────────────────┼─────────────────────┤
columns  dim 1: 4096 over tp, 4 shards of 1024                │        rank 3       │        rank 7       │
                                                         1024 └─────────────────────┴─────────────────────┘

                                                         rows     dim 0: 1024 over tp, 4 shards of 256
                                                         columns  dim 1: 4096 over dp, 2 shards of 2048"""  # noqa: E501
    assert drawing.startswith(str(made))


def test_else_one_stands_above_the_other():
    made = plan(SRC, DST)
    drawing = show(made, width=80)
    assert drawing.startswith(str(made) + "\n\nfrom [1024@dp, 4096@tp]\n")
    assert "\n\nto [1024@tp, 4096@dp]\n" in drawing
    assert max(map(len, drawing.splitlines()[3:])) <= 80


def test_a_rank_has_one_colour_on_both_sides():
    grounds: dict[str, set[str]] = {}
    for line in show(plan(SRC, DST)).coloured:
        for text, ground in line:
            if ground and "rank" in text:
                grounds.setdefault(text.strip(), set()).add(ground)
    assert len(grounds) == 8 and all(len(each) == 1 for each in grounds.values())
    assert len({each for (each,) in grounds.values()}) == 8


def test_the_drawing_to_scale_has_both_sides_and_the_steps():
    made = plan(SRC, DST)
    svg = show(made).svg()
    assert svg.count(">rank 3<") == 2
    for line in str(made).splitlines()[1:]:
        assert line.strip().replace(">", "&gt;") in svg


def test_a_plan_on_65536_ranks_is_drawn_in_short():
    mesh = Mesh({"a": 256, "b": 256})
    made = plan(Layout(mesh, (4096, 4096), P("a", "b")), Layout(mesh, (4096, 4096), P("b", "a")))
    drawing = show(made)
    assert len(drawing.splitlines()) < 60
    lines = rank_lines(made, 300)
    assert len(lines) < 40


def test_what_one_rank_does():
    assert rank_lines(plan(SRC, DST), 3) == [
        "Rank 3 holds [0:512, 3072:4096], then [768:1024, 0:2048]",
        "  1. Exchange over dp,tp: receives 2.1 MB",
        "     from 4  [768:1024, 0:1024]",
        "     from 5  [768:1024, 1024:2048]",
        "     to 4    [0:256, 3072:4096]",
        "     to 5    [256:512, 3072:4096]",
    ]


def test_what_one_rank_does_with_partial_values():
    src = Layout(MESH, (8, 8), P(partial={"tp": "sum"}))
    assert rank_lines(plan(src, Layout(MESH, (8, 8), P("tp"))), 6) == [
        "Rank 6 holds [0:8, 0:8], then [4:6, 0:8]",
        "  1. ReduceScatter over tp: receives 192 bytes",
        "     its own              [4:6, 0:8]",
        "     partials from 4,5,7  [4:6, 0:8]",
        "     a partial to 4       [0:2, 0:8]",
        "     a partial to 5       [2:4, 0:8]",
        "     a partial to 7       [6:8, 0:8]",
    ]
    assert rank_lines(plan(src, Layout(MESH, (8, 8), P("dp"))), 6)[1:] == [
        "  1. Slice: receives 0 bytes",
        "     keeps  [4:8, 0:8]",
        "  2. AllReduce over tp: receives 192 bytes",
        "     reduces with 4,5,7  [4:8, 0:8]",
    ]
    assert rank_lines(plan(Layout(MESH, (8, 8), P("tp")), Layout(MESH, (8, 8))), 6)[1:] == [
        "  1. AllGather over tp: receives 192 bytes",
        "     keeps     [4:6, 0:8]",
        "     from 4    [0:2, 0:8]",
        "     from 5    [2:4, 0:8]",
        "     from 7    [6:8, 0:8]",
        "     to 4,5,7  [4:6, 0:8]",
    ]
    whole = Layout(MESH, (8, 8))
    assert rank_lines(plan(whole, Layout(MESH, (8, 8), P(partial={"tp": "sum"}))), 6)[1:] == [
        "  1. MakePartial over tp: receives 0 bytes",
        "     holds as partial  [0:8, 0:8]",
    ]


def across() -> Plan:
    src = Layout(Mesh({"dp": 2, "tp": 2}), (8, 4), P("dp", "tp"))
    return plan(src, Layout(Mesh({"x": 4}, ranks=range(2, 6)), (8, 4), P("x")))


def test_both_meshes_are_named():
    drawing = show(across())
    for head in ("from [8@dp, 4@tp] on Mesh(dp=2, tp=2): 4 ranks",
                 "to [8@x, 4] on Mesh(x=4): ranks 2-5"):
        assert head in drawing.splitlines()
    grounds = {(text.split()[-1], ground) for line in drawing.coloured
               for text, ground in line if ground and text.strip()}
    assert len(grounds) == len({ground for _, ground in grounds}) == 6


def test_from_one_mesh_to_another():
    assert rank_lines(across(), 2) == [
        "Rank 2 holds [4:8, 0:2], then [0:2, 0:4]",
        "  1. Transfer: receives 32 bytes",
        "     from 0  [0:2, 0:2]",
        "     from 1  [0:2, 2:4]",
        "     to 4    [4:6, 0:2]",
        "     to 5    [6:8, 0:2]",
    ]
    assert rank_lines(across(), 1)[:2] == [
        "Rank 1 holds [0:4, 2:4], then nothing", "  1. Transfer: receives 0 bytes",
    ]
    assert rank_lines(across(), 5)[0] == "Rank 5 holds nothing, then [6:8, 0:4]"


def given_and_taken(made: Plan, ranks: list[int]) -> tuple[Counter, Counter]:
    """(giver, taker, box) of every row: as givers say it, and as takers do."""
    given_, taken = Counter(), Counter()
    for rank in ranks:
        step = 0
        for line in rank_lines(made, rank):
            step += bool(re.match(r"  \d+\. ", line))
            if match := re.fullmatch(r"     (from|to) ([\d,-]+) +(\[.*\])", line):
                for peer in _numbers(match[2]):
                    if match[1] == "to":
                        given_[step, rank, peer, match[3]] += 1
                    else:
                        taken[step, peer, rank, match[3]] += 1
    return given_, taken


def _numbers(text: str) -> list[int]:
    spans = [part.split("-") for part in text.split(",")]
    return [rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)]


@given(layouts(), layouts())
@settings(max_examples=200, deadline=None)
def test_what_one_takes_another_gives(src: Layout, other: Layout):
    dst = Layout.make(src.mesh, src.shape, ((),) * src.ndim)
    if other.mesh.ndim == src.mesh.ndim and other.ndim == src.ndim:
        sizes_fit = other.mesh.axis_sizes == src.mesh.axis_sizes
        if sizes_fit and not other.is_partial:
            dst = Layout.make(src.mesh, src.shape, other.dims)
    assume(src.mesh.size() <= 8 and 0 not in src.shape)
    made = plan(src, dst)
    gives, takes = given_and_taken(made, [src.mesh.rank_at(at) for at in range(src.mesh.size())])
    assert gives == takes


@pytest.mark.parametrize("spec", [P("dp", "tp"), P("tp"), P(None, ("tp", "dp"))])
@pytest.mark.parametrize("ranks", [range(3), range(2, 5), range(8, 11), (7, 1, 4)])
def test_what_one_takes_another_gives_across_meshes(spec: P, ranks):
    src = Layout(Mesh({"dp": 2, "tp": 2}), (7, 4), spec)
    made = plan(src, Layout(Mesh({"x": 3}, ranks=ranks), (7, 4), P("x")))
    gives, takes = given_and_taken(made, sorted({*range(4), *ranks}))
    assert gives == takes and gives


def test_a_rank_outside_is_refused():
    with pytest.raises(LayoutError) as raised:
        rank_lines(across(), 9)
    assert str(raised.value) == (
        "rank_lines(plan, rank): rank 9 is not among those of Mesh(dp=2, tp=2): 4 ranks or "
        "Mesh(x=4): ranks 2-5.\n"
        "  Rule: only a rank of a mesh takes part.\n"
        "  Offenders: 9\n"
        "  Fix: rank 0"
    )
