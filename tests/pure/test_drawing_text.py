"""Drawings as text, word for word."""
# ruff: noqa: E501

from __future__ import annotations

import time

import pytest

from weft.core import Layout, Mesh, P
from weft.core.parse import parse_layout, parse_mesh
from weft.drawing import show, sketch
from weft.drawing.text import plain

CASES: dict[tuple[str, tuple[int, ...] | None, str, int], str] = {
    ("dp=2,tp=4", None, "[1024@dp, 4096@tp]", 64): """
[1024@dp, 4096@tp] on Mesh(dp=2, tp=4): 8 ranks

     0            1024          2048          3072         4096
   0 ┌─────────────┬─────────────┬─────────────┬─────────────┐
     │    rank 0   │    rank 1   │    rank 2   │    rank 3   │
 512 ├─────────────┼─────────────┼─────────────┼─────────────┤
     │    rank 4   │    rank 5   │    rank 6   │    rank 7   │
1024 └─────────────┴─────────────┴─────────────┴─────────────┘

rows     dim 0: 1024 over dp, 2 shards of 512
columns  dim 1: 4096 over tp, 4 shards of 1024""",
    ("tp=4", None, "[20@tp{6,3,4,7}]", 60): """
[20@tp{6,3,4,7}] on Mesh(tp=4): 4 ranks

0                6        9          13                20
┌────────────────┬────────┬──────────┬──────────────────┐
│     rank 0     │ rank 1 │  rank 2  │      rank 3      │
└────────────────┴────────┴──────────┴──────────────────┘

columns  dim 0: 20 over tp, 4 shards of 6, 3, 4, 7""",
    ("dp=2,tp=3", None, "[5@dp, 7@tp]", 60): """
[5@dp, 7@tp] on Mesh(dp=2, tp=3): 6 ranks

  0              3              6    7
0 ┌──────────────┬──────────────┬────┐
  │              │              │    │
  │              │              │    │
  │              │              │    │
  │      0       │      1       │ 2  │
  │              │              │    │
  │              │              │    │
  │              │              │    │
3 ├──────────────┼──────────────┼────┤
  │              │              │    │
  │      3       │      4       │ 5  │
  │              │              │    │
  │              │              │    │
5 └──────────────┴──────────────┴────┘

rows     dim 0: 5 over dp, 2 shards of 3, 2
columns  dim 1: 7 over tp, 3 shards of 3, 3, 1
cells    the ranks that hold each block""",
    ("dp=2,tp=4", None, "[6, 8]", 60): """
[6, 8] on Mesh(dp=2, tp=4): 8 ranks

  0                                8
0 ┌────────────────────────────────┐
  │                                │
  │                                │
  │                                │
  │                                │
  │                                │
  │           ranks 0-7            │
  │                                │
  │                                │
  │                                │
  │                                │
  │                                │
6 └────────────────────────────────┘

rows     dim 0: 6, whole
columns  dim 1: 8, whole
copies   the whole tensor on 8 ranks, over dp,tp""",
    ("dp=2,tp=2", None, "f32[4@tp, 8]", 60): """
f32[4@tp, 8] on Mesh(dp=2, tp=2): 4 ranks

  0                                                8
0 ┌────────────────────────────────────────────────┐
  │                                                │
  │                                                │
  │                   ranks 0,2                    │
  │                                                │
  │                                                │
2 ├────────────────────────────────────────────────┤
  │                                                │
  │                                                │
  │                   ranks 1,3                    │
  │                                                │
  │                                                │
4 └────────────────────────────────────────────────┘

rows     dim 0: 4 over tp, 2 shards of 2
columns  dim 1: 8, whole
copies   each block on 2 ranks, over dp""",
    ("dp=2,tp=2,cp=2", None, "[4@dp, 16] partial(max@tp)", 60): """
[4@dp, 16] partial(max@tp) on Mesh(dp=2, tp=2, cp=2): 8 ranks

  0                                                      16
0 ┌───────────────────────────────────────────────────────┐
  │                                                       │
  │                ranks max((0,1), (2,3))                │
  │                                                       │
2 ├───────────────────────────────────────────────────────┤
  │                                                       │
  │                ranks max((4,5), (6,7))                │
  │                                                       │
4 └───────────────────────────────────────────────────────┘

rows     dim 0: 4 over dp, 2 shards of 2
columns  dim 1: 16, whole
copies   each partial value on 2 ranks, over cp
partial  2 partial values of each element, to be reduced:
         max over tp""",
    ("dp=2,tp=64", None, "[8@dp] partial(sum@tp)", 60): """
[8@dp] partial(sum@tp) on Mesh(dp=2, tp=64): 128 ranks

0                            4                            8
┌────────────────────────────┬────────────────────────────┐
│    ranks 0 + 1 + … + 63    │  ranks 64 + 65 + … + 127   │
└────────────────────────────┴────────────────────────────┘

columns  dim 0: 8 over dp, 2 shards of 4
partial  64 partial values of each element, to be reduced:
         sum over tp""",
    ("dp=2,tp=3", None, "[6@(tp,dp)]", 60): """
[6@(tp,dp)] on Mesh(dp=2, tp=3): 6 ranks

0        1        2        3        4        5        6
┌────────┬────────┬────────┬────────┬────────┬────────┐
│ rank 0 │ rank 3 │ rank 1 │ rank 4 │ rank 2 │ rank 5 │
└────────┴────────┴────────┴────────┴────────┴────────┘

columns  dim 0: 6 over tp,dp, 6 shards of 1""",
    ("x=6", None, "[3@x, 2]", 60): """
[3@x, 2] on Mesh(x=6): 6 ranks

  0                2
0 ┌────────────────┐
  │                │
  │     rank 0     │
  │                │
1 ├────────────────┤
  │                │
  │     rank 1     │
  │                │
2 ├────────────────┤
  │                │
  │     rank 2     │
  │                │
3 ├────────────────┤
  │  ∅ ranks 3-5   │
3 └────────────────┘

rows     dim 0: 3 over x, 6 shards of 1, 1, 1, 0, 0, 0
columns  dim 1: 2, whole
∅        holds no element""",
    ("x=2,y=2", (8, 10, 12, 14), "[4@x, 6]", 60): """
[4@x, 6] on Mesh(x=2, y=2): ranks 8,10,12,14

  0                                    6
0 ┌────────────────────────────────────┐
  │                                    │
  │                                    │
  │             ranks 8,10             │
  │                                    │
  │                                    │
2 ├────────────────────────────────────┤
  │                                    │
  │                                    │
  │            ranks 12,14             │
  │                                    │
  │                                    │
4 └────────────────────────────────────┘

rows     dim 0: 4 over x, 2 shards of 2
columns  dim 1: 6, whole
copies   each block on 2 ranks, over y""",
    ("dp=2,tp=2,cp=2", None, "[6@dp, 8@cp, 4@tp]", 60): """
[6@dp, 8@cp, 4@tp] on Mesh(dp=2, tp=2, cp=2): 8 ranks

[0:3, :, :]   [3:6, :, :]
  0   2   4     0   2   4
0 ┌───┬───┐   0 ┌───┬───┐
  │   │   │     │   │   │
  │ 0 │ 2 │     │ 4 │ 6 │
  │   │   │     │   │   │
4 ├───┼───┤   4 ├───┼───┤
  │   │   │     │   │   │
  │ 1 │ 3 │     │ 5 │ 7 │
  │   │   │     │   │   │
8 └───┴───┘   8 └───┴───┘

panels   dim 0: 6 over dp, 2 shards of 3
rows     dim 1: 8 over cp, 2 shards of 4
columns  dim 2: 4 over tp, 2 shards of 2
cells    the ranks that hold each block""",
    ("a=2,b=2,c=2,d=2", None, "[4@a, 4@b, 4@c, 8@d]", 44): """
[4@a, 4@b, 4@c, 8@d] on Mesh(a=2, b=2, c=2, d=2): 16 ranks

[0:2, 0:2, :, :]
  0            4            8
0 ┌────────────┬────────────┐
  │   rank 0   │   rank 1   │
2 ├────────────┼────────────┤
  │   rank 2   │   rank 3   │
4 └────────────┴────────────┘

[0:2, 2:4, :, :]
  0            4            8
0 ┌────────────┬────────────┐
  │   rank 4   │   rank 5   │
2 ├────────────┼────────────┤
  │   rank 6   │   rank 7   │
4 └────────────┴────────────┘

[2:4, 0:2, :, :]
  0            4            8
0 ┌────────────┬────────────┐
  │   rank 8   │   rank 9   │
2 ├────────────┼────────────┤
  │  rank 10   │  rank 11   │
4 └────────────┴────────────┘

[2:4, 2:4, :, :]
  0            4            8
0 ┌────────────┬────────────┐
  │  rank 12   │  rank 13   │
2 ├────────────┼────────────┤
  │  rank 14   │  rank 15   │
4 └────────────┴────────────┘

panels   dim 0: 4 over a, 2 shards of 2
panels   dim 1: 4 over b, 2 shards of 2
rows     dim 2: 4 over c, 2 shards of 2
columns  dim 3: 8 over d, 2 shards of 4""",
    ("dp=2,tp=2", None, "[8@dp, 12@tp, 128, 64]", 60): """
[8@dp, 12@tp, 128, 64] on Mesh(dp=2, tp=2): 4 ranks

  0                  6                 12
0 ┌──────────────────┬──────────────────┐
  │                  │                  │
  │                  │                  │
  │      rank 0      │      rank 1      │
  │                  │                  │
  │                  │                  │
4 ├──────────────────┼──────────────────┤
  │                  │                  │
  │                  │                  │
  │      rank 2      │      rank 3      │
  │                  │                  │
  │                  │                  │
8 └──────────────────┴──────────────────┘

rows     dim 0: 8 over dp, 2 shards of 4
columns  dim 1: 12 over tp, 2 shards of 6
whole    dim 2: 128, dim 3: 64""",
    ("dp=2,tp=2", None, "[] partial(sum@dp)", 60): """
[] partial(sum@dp) on Mesh(dp=2, tp=2): 4 ranks

┌──────────────────────────────────────────────────────────┐
│                   ranks (0,1) + (2,3)                    │
└──────────────────────────────────────────────────────────┘

copies   each partial value on 2 ranks, over tp
partial  2 partial values of each element, to be reduced:
         sum over dp""",
    ("a=256,b=256", None, "[1048576@a, 4096@b]", 80): """
[1048576@a, 4096@b] on Mesh(a=256, b=256): 65,536 ranks

        0       16      32      48 4048    4064    4080   4096
      0 ┌───────┬───────┬───────┬┄┄┄┬───────┬───────┬───────┐
        │   0   │   1   │   2   │ … │  253  │  254  │  255  │
   4096 ├───────┼───────┼───────┼┄┄┄┼───────┼───────┼───────┤
        │  256  │  257  │  258  │ … │  509  │  510  │  511  │
   8192 ├───────┼───────┼───────┼┄┄┄┼───────┼───────┼───────┤
        │  512  │  513  │  514  │ … │  765  │  766  │  767  │
  12288 ├───────┼───────┼───────┼┄┄┄┼───────┼───────┼───────┤
        ┆   ⋮   ┆   ⋮   ┆   ⋮   ┆ ⋱ ┆   ⋮   ┆   ⋮   ┆   ⋮   ┆
1036288 ├───────┼───────┼───────┼┄┄┄┼───────┼───────┼───────┤
        │ 64768 │ 64769 │ 64770 │ … │ 65021 │ 65022 │ 65023 │
1040384 ├───────┼───────┼───────┼┄┄┄┼───────┼───────┼───────┤
        │ 65024 │ 65025 │ 65026 │ … │ 65277 │ 65278 │ 65279 │
1044480 ├───────┼───────┼───────┼┄┄┄┼───────┼───────┼───────┤
        │ 65280 │ 65281 │ 65282 │ … │ 65533 │ 65534 │ 65535 │
1048576 └───────┴───────┴───────┴┄┄┄┴───────┴───────┴───────┘

rows     dim 0: 1048576 over a, 256 shards of 4096
columns  dim 1: 4096 over b, 256 shards of 16
cells    the ranks that hold each block
…        not drawn: 250 of 256 shards of dims 0, 1""",
    ("a=256,b=256", None, "[65536@(a,b)]", 80): """
[65536@(a,b)] on Mesh(a=256, b=256): 65,536 ranks

0          1          2          3 65533      65534      65535      65536
┌──────────┬──────────┬──────────┬┄┄┄┬──────────┬──────────┬──────────┐
│    0     │    1     │    2     │ … │  65533   │  65534   │  65535   │
└──────────┴──────────┴──────────┴┄┄┄┴──────────┴──────────┴──────────┘

columns  dim 0: 65536 over a,b, 65,536 shards of 1
cells    the ranks that hold each block
…        not drawn: 65,530 of 65,536 shards of dim 0""",
    ("a=256,b=256", None, "[100000@(a,b)]", 80): """
[100000@(a,b)] on Mesh(a=256, b=256): 65,536 ranks

0          2          4          6  126        128               100000
┌──────────┬──────────┬──────────┬┄┄┄┬──────────┬┄┄┄┬───────────────┐
│    0     │    1     │    2     │ … │    63    │ … │ ∅ 65472-65535 │
└──────────┴──────────┴──────────┴┄┄┄┴──────────┴┄┄┄┴───────────────┘

columns  dim 0: 100000 over a,b, 65,536 shards of 0 to 2
cells    the ranks that hold each block
∅        holds no element
…        not drawn: 65,468 of 65,536 shards of dim 0""",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2]}")
def test_drawings_word_for_word(case: tuple[str, tuple[int, ...] | None, str, int]):
    mesh, ranks, text, width = case
    layout, dtype = parse_layout(text, parse_mesh(mesh, ranks))
    assert show(layout, width=width, dtype=dtype) == CASES[case].lstrip("\n")


LARGE = [
    Layout(Mesh({"a": 65536}), (2**20,), P("a")),
    Layout(Mesh({"a": 65536}), (100, 7), P("a")),
    Layout(Mesh({"a": 65536}), (2**20, 7), P("a"), sizes={0: "balanced"}),
    Layout(Mesh({"a": 65536}), (2**17,), P("a"), sizes={0: (*range(3), *[1] * 65532, 2**17 - 65535)}),
    Layout(Mesh({"a": 256, "b": 256}), (1000, 4096), P("b", "a")),
    Layout(Mesh({"a": 256, "b": 256}), (1000, 4096), P(("b", "a"))),
    Layout(Mesh({"a": 256, "b": 256}), (4096,), P(partial={"a": "sum", "b": "sum"})),
    Layout(Mesh({"a": 256, "b": 256}, ranks=range(65536, 2**17)), (2**20,), P(("a", "b"))),
    Layout(Mesh({"a": 16, "b": 16, "c": 16, "d": 16}), (64, 64, 32, 128), P("a", "b", "c", "d")),
    Layout(Mesh({"a": 64, "b": 32, "c": 32}), (3, 64, 32, 128), P("a", ("c", "b"))),
]


@pytest.mark.parametrize("layout", LARGE, ids=range(len(LARGE)))
def test_65536_ranks_are_drawn_fast_and_in_short(layout: Layout):
    start = time.thread_time()
    drawing = show(layout)
    svg = drawing.svg()
    # 0.1 s on a quiet machine, most of it the cuts of 65,536 shards.
    assert time.thread_time() - start < 2
    lines = drawing.splitlines()
    assert len(lines) < 70 and max(map(len, lines)) <= 81 and len(drawing) < 6000
    assert "65,536 ranks" in lines[0] or "ranks 65536-131071" in lines[0]
    assert len(svg) < 80_000


def test_lines_are_as_wide_as_asked():
    mesh = Mesh({"dp": 2, "tp": 12})
    for spec in (P("dp", "tp"), P("tp", "dp"), P(("dp", "tp")), P("dp", None, "tp"),
                 P("tp", partial={"dp": "sum"}), P(None, "tp", "dp")):
        layout = Layout(mesh, (100, 2000, 30), spec)
        for width in range(50, 130, 3):
            lines = show(layout, width=width).splitlines()[1:]  # below the title
            assert max(map(len, lines)) <= width, (spec, width)


def test_colours_go_by_rank():
    mesh = Mesh({"dp": 2, "tp": 2})
    line = next(line for line in show(Layout(mesh, (4, 8), P("dp", "tp"))).coloured
                if any("rank 0" in text for text, _ in line))
    grounds = [ground for text, ground in line if "rank" in text]
    assert len(set(grounds)) == 2 and None not in grounds
    assert {ground for text, ground in line if "rank" not in text} == {None}


def test_a_drawing_is_text_that_a_session_shows():
    drawing = show(Layout(Mesh((2,)), (4,), P(0)))
    assert isinstance(drawing, str)
    assert repr(drawing) == str(drawing) == "\n".join(drawing.splitlines())
    assert drawing._repr_svg_() == drawing.svg()


def test_a_sketch_is_blocks_alone():
    mesh = Mesh({"dp": 2, "tp": 2})
    rows = Layout(mesh, (10, 20), P("tp"), sizes={0: (7, 3)})
    assert plain(sketch(rows, 20, 7)).splitlines() == [
        "   0                   20",
        " 0 ┌────────────────────┐",
        "   │                    │",
        "   │     ranks 0,2      │",
        "   │                    │",
        " 7 ├────────────────────┤",
        "   │     ranks 1,3      │",
        "10 └────────────────────┘",
    ]
    assert plain(sketch(Layout(mesh, (5,), P(("dp", "tp"))), 30)).splitlines() == [
        "0            2      3      4      5",
        "┌────────────┬──────┬──────┬──────┐",
        "│     0      │  1   │  2   │  3   │",
        "└────────────┴──────┴──────┴──────┘",
    ]
