"""What weft prints can be read back; what cannot be read is refused with a corrected text."""
# ruff: noqa: E501

from __future__ import annotations

import doctest

import pytest
from hypothesis import given, settings

import weft.core.dtypes
import weft.core.parse
from tests.pure.test_core_layout import layouts
from weft.core import Layout, Mesh, P, Partial, Replicate, Shard, StridedShard
from weft.core.dtypes import dtype_name, dtype_text, itemsize
from weft.core.parse import (
    parse_layout,
    parse_mesh,
    parse_ranks,
    parse_shape,
    parse_sizes,
    parse_spec,
    read_layout,
)
from weft.errors import LayoutError, MeshError, PlacementError, WeftError

MESH = Mesh({"dp": 2, "tp": 4})


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_every_spelling_of_a_layout_is_read_back(layout: Layout):
    mesh, shape = layout.mesh, layout.shape
    assert parse_layout(layout.text("float32"), mesh) == (layout, "f32")
    assert parse_layout(str(layout), mesh) == (layout, None)
    assert parse_mesh(str(mesh), mesh.ranks) == mesh
    assert parse_shape(str(shape)) == shape
    for placements in (repr(layout.placements), f"[{', '.join(map(str, layout.placements))}]"):
        if mesh.ndim:
            assert Layout(mesh, shape, parse_spec(placements)) == layout
    sizes = {dim: layout.sizes_of(dim) for dim, cut in enumerate(layout.cuts) if cut}
    assert read_layout(mesh, repr(layout.spec), shape, sizes)[0] == layout
    assert read_layout(mesh, str(layout))[0] == layout


def test_numbered_axes_are_read_back():
    mesh = Mesh((2, 3))
    layout = Layout(mesh, (4, 6), P((1, 0), partial={}))
    assert parse_mesh(str(mesh)) == parse_mesh("2,3") == mesh
    assert parse_layout(str(layout), mesh)[0] == layout
    assert parse_spec("P((1, 0))") == P((1, 0))


@pytest.mark.parametrize(("text", "spec"), [
    ("P(dp,tp)", P("dp", "tp")), (" P( 'dp' , \"tp\", ) ", P("dp", "tp")), ("P()", P()),
    ("P((dp,tp),None,partial={cp:sum})", P(("dp", "tp"), None, partial={"cp": "sum"})),
    ("P(None, [a, b])", P(None, ("a", "b"))), ("P((dp,))", P("dp")), ("P('a:b', c.d/e-f)", P("a:b", "c.d/e-f")),
    ("P(partial={'a': 'and', b: or})", None),
    ("[Shard(0), Replicate()]", (Shard(0), Replicate())), ("(S(-1), R)", (Shard(-1), Replicate())),
    ("[Partial(), P(max), Partial(reduce_op='and')]", (Partial(), Partial("max"), Partial("and"))),
    ("[Shard(dim=1, sizes=(6, 14)), R,]", (Shard(1, (6, 14)), Replicate())),
    ("[_S(0, 2), StridedShard(dim=0, split_factor=2, skip=1)]",
     (StridedShard(0, 2), StridedShard(0, 2, skip=1))),
])
def test_specs(text: str, spec):
    if spec is None:
        spec = P(partial={"a": "and", "b": "or"})
    assert parse_spec(text) == spec


@pytest.mark.parametrize(("text", "ranks"), [
    ("0", (0,)), ("8-11", (8, 9, 10, 11)), (" 3, 1,0 ", (3, 1, 0)), ("0,4-5,9", (0, 4, 5, 9)),
])
def test_ranks(text: str, ranks: tuple[int, ...]):
    assert parse_ranks(text) == ranks


def test_sizes():
    given_ = parse_sizes(["0=6,3,4,7", " -1 = balanced"])
    assert given_ == {0: (6, 3, 4, 7), -1: "balanced"}
    assert read_layout(MESH, "P(tp, dp)", (20, 5), given_)[0].sizes_of(0) == (6, 3, 4, 7)


CASES: dict[str, tuple[type[WeftError], str]] = {
    'parse_mesh("dp=2;tp=4")': (MeshError, """
mesh: 'dp=2;tp=4' has 1 of 1 parts that are no axis.
  Rule: a mesh is written as name=size, separated by commas, or as sizes alone.
  Offenders: 'dp=2;tp=4'
  Fix: dp=2,tp=4"""),
    'parse_mesh("dp=2,4")': (MeshError, """
mesh: 'dp=2,4' has 1 of 2 parts that are no axis.
  Rule: a mesh is written as name=size, separated by commas, or as sizes alone.
  Offenders: '4'
  Fix: dp=2"""),
    'parse_ranks("8..15,3")': (MeshError, """
ranks: '8..15,3' has 1 of 2 parts that are no ranks.
  Rule: ranks are numbers and ranges first-last, separated by commas.
  Offenders: '8..15'
  Fix: 8-15,3"""),
    'parse_ranks("15-8")': (MeshError, """
ranks: '15-8' has 1 of 1 parts that are no ranks.
  Rule: ranks are numbers and ranges first-last, separated by commas.
  Offenders: '15-8'
  Fix: 8-15"""),
    'parse_shape("1024x4096")': (LayoutError, """
shape: '1024x4096' has 1 of 1 parts that are no lengths.
  Rule: a shape is written as whole numbers, separated by commas.
  Offenders: '1024x4096'
  Fix: 1024,4096"""),
    'parse_sizes(["0:6,3", "1=2", "1=3"])': (LayoutError, """
sizes: 2 of 3 texts give no sizes of a dim of their own.
  Rule: sizes are written as dim=size,size,... in shard order, or dim=balanced, dim=flat; each dim once.
  Offenders: '0:6,3', '1=3', dim 1 again
  Fix: 0=6,3"""),
    'parse_spec("P(dp,tp")': (PlacementError, """
spec: 'P(dp,tp' cannot be read: it ends where ',' or ')' is due.
  Rule: it is written as weft prints it: a spec P(dp, None, (tp,sp), partial={cp: sum}), placements [Shard(0), Replicate(), Partial(sum)], or a layout's text [8@dp, 16@(tp,sp)] partial(sum@cp).
  Offenders: 'P(dp,tp'
  Fix: P(dp,tp)"""),
    'parse_layout("8@dp", MESH)': (PlacementError, """
layout: '8@dp' cannot be read: 8 stands at character 1, where '[' is due.
  Rule: it is written as weft prints it: a spec P(dp, None, (tp,sp), partial={cp: sum}), placements [Shard(0), Replicate(), Partial(sum)], or a layout's text [8@dp, 16@(tp,sp)] partial(sum@cp).
  Offenders: '8@dp'
  Fix: [8@dp]"""),
    'read_layout(MESH, "P(dp)")': (LayoutError, """
spec: 'P(dp)' has no shape, and none is given.
  Rule: a spec says which axes shard, so it needs a global shape; a layout's own text has one.
  Offenders: P(dp)
  Fix: --shape 1024,4096 spec 'P(dp)'"""),
    'read_layout(MESH, "[8@dp]", (9,))': (LayoutError, """
spec: '[8@dp]' has shape (8,), beside shape (9,).
  Rule: a layout's own text says the shape.
  Offenders: (9,)
  Fix: [8@dp]"""),
    'read_layout(MESH, "{replicated}", (9,), {0: (9,)})': (PlacementError, """
spec: '{replicated}' and sizes for 1 dims.
  Rule: a layout's own text, or an op-sharding, says where it cuts, so it takes no sizes.
  Offenders: 0=(9,)
  Fix: {replicated}"""),
    'dtype_name("float")': (LayoutError, """
dtype: 'float' names no dtype.
  Rule: a dtype is named as torch names it, or as a layout's text does: float32 or f32, bfloat16, int64, bool, complex64, float8_e4m3fn.
  Offenders: 'float'
  Fix: float32"""),
}


@pytest.mark.parametrize("code", CASES)
def test_errors_show_the_corrected_text(code: str):
    kind, text = CASES[code]
    with pytest.raises(kind) as raised:
        eval(code, {**globals()})
    assert str(raised.value) == text.lstrip("\n")


@pytest.mark.parametrize(("text", "fix"), [
    ("P(dp tp)", "P(dp,tp)"), ("dp,tp", "P(dp,tp)"), ("dp", "P(dp)"), ("P[dp]", "P(dp)"),
    ("P(dp]", "P(dp)"), ("[S(0),", "[S(0)]"), ("Shard(0), R", "[Shard(0), R]"), ("Shard(0)", "[Shard(0)]"),
    ("", "P()"), ("P(dp,+)", "P(dp)"), ("[Shard(0), Replica()]", None), ("[Shard()]", None),
    ("P(dp, part={})", None), ("P(Shard(0))", None), ("P(partial={[a]: sum})", None),
    ("P(dp, partial={a: sum, a: max})", None), ("P(0.5)", "P()"), ("P(dp) P(tp)", None),
    ("P(partial={}, dp)", None), ("P(partial={}, partial={})", None), ("[3@a]", None), ("[x]", "P(x)"),
])
def test_specs_that_cannot_be_read(text: str, fix: str | None):
    with pytest.raises(PlacementError) as raised:
        parse_spec(text)
    shown = str(raised.value).splitlines()[-1].removeprefix("  Fix: ")
    assert shown == (fix or "P(dp,tp), one entry per dim; or [Shard(0), Replicate()], one placement per mesh axis")
    if fix:
        parse_spec(fix)


@pytest.mark.parametrize("text", [
    "[8@dp 4]", "[8@dp, 4] partial(dp)", "[8@dp, 4] partial", "[8, 4]x", "[x]", "f32", "[8@dp] partial(sum@tp, max@tp)",
    "[8@dp] partial(sum@[a])",
])
def test_layouts_that_cannot_be_read(text: str):
    with pytest.raises(PlacementError, match="cannot be read"):
        parse_layout(text, MESH)


def test_op_shardings():
    layout = Layout(MESH, (8, 8), P("tp"))
    assert read_layout(MESH, layout.hlo_sharding(), (8, 8)) == (layout, None)


@pytest.mark.parametrize("name", [
    "float32", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex128",
])
def test_dtypes_by_both_names(name: str):
    torch = pytest.importorskip("torch")
    assert dtype_name(name) == dtype_name(dtype_text(name)) == dtype_name(f"torch.{name}") == name
    assert itemsize(name) == getattr(torch, name).itemsize


def test_the_examples_in_the_docstrings():
    for module in (weft.core.parse, weft.core.dtypes):
        assert doctest.testmod(module).failed == 0
