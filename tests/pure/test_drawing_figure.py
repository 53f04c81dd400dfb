"""Drawings to scale, as marks and as SVG."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from tests.pure.test_core_layout import layouts
from weft.core import Layout, Mesh, P
from weft.drawing import Drawing, Label, Rect, Scene, Stroke, show
from weft.drawing.colours import Colours
from weft.drawing.scene import bounds, hatch, moved, text_width
from weft.drawing.svg import svg

MESH = Mesh({"dp": 2, "tp": 4})
SVG = "{http://www.w3.org/2000/svg}"


def blocks(drawing: Drawing) -> list[Rect]:
    return [mark for mark in drawing.scene.marks if isinstance(mark, Rect)]


def labels(drawing: Drawing) -> list[str]:
    return [mark.text for mark in drawing.scene.marks if isinstance(mark, Label)]


def test_blocks_are_to_scale():
    layout = Layout(MESH, (100, 400), P("dp", "tp"), sizes={0: (30, 70), 1: (50, 150, 120, 80)})
    found = blocks(show(layout))
    assert [round(each.width) for each in found[:4]] == [75, 225, 180, 120]
    assert found[4].height / found[0].height == pytest.approx(70 / 30)
    assert found[0].width / found[0].height == pytest.approx(50 / 30)


def test_a_sliver_is_as_wide_as_its_name():
    found = blocks(show(Layout(MESH, (6, 4000), P(None, "tp"), sizes={1: (1, 3997, 1, 1)})))
    assert min(each.width for each in found) >= text_width("0,4", 12)


def test_every_block_has_a_colour_of_its_own():
    drawing = show(Layout(Mesh((12,)), (24, 2), P(0)))
    fills = [each.fill for each in blocks(drawing)]
    assert len(set(fills)) == len(fills) == 12


def test_colours_are_light_enough_for_dark_text():
    colours = Colours(range(64))
    for rank in range(64):
        ground = [int(colours.ground(rank)[at : at + 2], 16) for at in (1, 3, 5)]
        shade = [int(colours.shade(rank)[at : at + 2], 16) for at in (1, 3, 5)]
        assert sum(ground) / 3 > 180 and sum(shade) < sum(ground)


def test_the_words_of_a_drawing():
    drawing = show(Layout(MESH, (1024, 4096), P("dp", partial={"tp": "sum"})), dtype="bfloat16")
    assert labels(drawing) == [
        "bf16[1024@dp, 4096] partial(sum@tp)", "Mesh(dp=2, tp=4): 8 ranks",
        "ranks 0 + 1 + 2 + 3", "512 x 4096", "ranks 4 + 5 + 6 + 7", "512 x 4096",
        "0", "4096", "dim 1", "0", "512", "1024", "dim 0 over dp",
        "rows", "dim 0: 1024 over dp, 2 shards of 512", "columns", "dim 1: 4096, whole",
        "partial", "4 partial values of each element, to be reduced: sum over tp",
    ]


def test_terms_are_hatched_and_whole_values_are_not():
    whole = show(Layout(MESH, (8, 8), P("dp")))
    terms = show(Layout(MESH, (8, 8), P("dp", partial={"tp": "sum"})))
    strokes = [
        sum(isinstance(mark, Stroke) for mark in each.scene.marks) for each in (whole, terms)
    ]
    assert strokes[0] == 3 + 2 < strokes[1]  # the lines of the grid


def test_hatching_stays_inside():
    box = Rect(10, 20, 50, 30, "#ffffff")
    found = list(hatch(box, "#000000"))
    assert len(found) == 8
    for stroke in found:
        assert 10 <= stroke.x1 <= stroke.x2 <= 60 and 20 <= stroke.y2 <= stroke.y1 <= 50
        assert stroke.x2 - stroke.x1 == pytest.approx(stroke.y1 - stroke.y2)


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_marks_stay_on_the_page(layout: Layout):
    scene = show(layout).scene
    right, down = bounds(scene.marks)
    assert right <= scene.width and down <= scene.height
    for mark in scene.marks:
        if isinstance(mark, (Rect, Label)):
            assert mark.x >= 0 and mark.y >= 0


def test_svg_says_what_the_marks_say():
    drawing = show(Layout(MESH, (5, 8), P("dp", "tp")))
    root = ElementTree.fromstring(drawing.svg())
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert texts == labels(drawing)
    assert root.find(f"{SVG}title").text == "[5@dp, 8@tp] on Mesh(dp=2, tp=4): 8 ranks"
    rects = root.findall(f"{SVG}rect")
    assert len(rects) == 1 + 8  # the ground, and the blocks
    assert [each.get("fill") for each in rects[1:]] == [each.fill for each in blocks(drawing)]
    assert root.get("width") == str(round(drawing.scene.width))


def test_svg_escapes_text():
    scene = Scene(20, 10, (Label(1, 2, "a < b & c", turned=True),), "x > y")
    root = ElementTree.fromstring(svg(scene))
    assert root.find(f"{SVG}text").text == "a < b & c"
    assert root.find(f"{SVG}title").text == "x > y"


def test_marks_move():
    assert moved(Rect(1, 2, 3, 4, "#000000"), 10, 20) == Rect(11, 22, 3, 4, "#000000")
    assert moved(Stroke(1, 2, 3, 4, "#000000"), 1, 1) == Stroke(2, 3, 4, 5, "#000000")
    assert moved(Label(1, 2, "a"), 1, 1) == Label(2, 3, "a")


def test_files(tmp_path: Path):
    layout = Layout(MESH, (5, 8), P("dp", "tp"))
    drawing = show(layout, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == drawing.svg()
    assert show(layout, out=str(tmp_path / "a.txt")) == drawing
    assert (tmp_path / "a.txt").read_text() == drawing + "\n"
