"""Factor strings: what they parse to, what they bind to, and what is refused."""

import pytest

from weft.core import Layout, Mesh, P
from weft.errors import LayoutError, PlacementError
from weft.propagate import decide
from weft.rules import Call, Table, TensorArg, bind, parse, rule
from weft.rules import rule as written
from weft.rules.bind import operand_places


def test_a_matrix_product() -> None:
    rule = bind(parse("m k, k n -> m n"), [(5, 4), (4, 3)], [(5, 3)], linear=((0,), (1,)))
    assert rule.operands == ((("m",), ("k",)), (("k",), ("n",)))
    assert rule.results == ((("m",), ("n",)),)
    assert {name: rule.sizes[name] for name in "mkn"} == {"m": 5, "k": 4, "n": 3}
    assert rule.reduce == {"k": "sum"}
    assert rule.linear == ((0,), (1,))


def test_leading_dims_broadcast_from_the_right() -> None:
    rule = bind(parse("... k, ... k -> ..."), [(2, 1, 4), (3, 4)], [(2, 3)])
    assert rule.operands == ((("d0",), (), ("k",)), (("d1",), ("k",)))
    assert rule.results == ((("d0",), ("d1",)),)


def test_a_result_may_have_new_leading_dims() -> None:
    rule = bind(parse("... -> ..."), [(5, 1)], [(3, 5, 4)])
    assert rule.operands == ((("d1",), ()),)
    assert rule.results == ((("d0",), ("d1",), ("d2",)),)


@pytest.mark.parametrize("dim", [1, -2])
def test_a_result_may_have_the_dim_that_an_argument_names(dim: int) -> None:
    rule = bind(parse("{...} -> ... n"), [(5, 4)] * 2, [(5, 2, 4)], along=(dim,))
    assert rule.operands == ((("d0",), ("d2",)),) * 2
    assert rule.results == ((("d0",), ("n",), ("d2",)),)


def test_dims_behind_those_that_an_argument_names_are_the_last_ones() -> None:
    rule = bind(parse("... s! -> ... w! i!"), [(5, 9, 4)], [(5, 7, 4, 3)], along=(1,))
    assert rule.operands == ((("d0",), ("s",), ("d2",)),)
    assert rule.results == ((("d0",), ("w",), ("d2",), ("i",)),)
    rule = bind(parse("... s! -> ... w! i!"), [()], [(1,)], along=(0,))
    assert (rule.operands, rule.results) == (((),), ((("i",),),))


def test_a_list_is_linear_in_all_of_its_tensors_together() -> None:
    joined = written("{...} -> ... n", along="dim", linear=[0], moves=True)
    one, other = TensorArg((5,), "float32"), TensorArg((5,), "float64")
    for operands, moves in (([one, one], True), ([one, other], False)):
        call = Call("aten.stack.default", (operands, 0), {},
                    (TensorArg((2, 5), operands[-1].dtype),), ("tensors", "dim"), (2,))
        found = joined.bind(call, [])
        assert found is not None and found.linear == ((0, 1),)
        assert found.moves == moves  # where a dtype changes, sums pass alone


def test_sizes_along_a_dim_are_those_of_the_dims_from_there_on() -> None:
    apart = written("a (b c) -> a b c", along="dim", sizes="sizes")
    call = Call("aten.unflatten.int", (TensorArg((5, 6), "float32"), -1, [2, 3]), {},
                (TensorArg((5, 2, 3), "float32"),), ("self", "dim", "sizes"), (1,))
    found = apart.bind(call, [])
    assert found is not None
    assert (found.size_arg, found.size_dims) == (2, (1, 3))


def test_compound_dims_find_their_sizes() -> None:
    rule = bind(parse("b (h d), d -> b h d"), [(2, 20), (4,)], [(2, 5, 4)])
    assert rule.operands[0] == (("b",), ("h", "d"))
    assert rule.sizes["h"] == 5


def test_a_compound_dim_is_led_by_its_first_factor_that_is_longer_than_one() -> None:
    rule = bind(parse("(a b) -> a b"), [(6,)], [(1, 6)])
    assert rule.operands == ((("b",),),)
    assert "a" in rule.whole


def test_marks() -> None:
    pattern = parse("b s:max t! (h d) -> b h")
    assert pattern.reduce == {"d": "sum", "s": "max"}
    assert pattern.whole == {"t"}


def test_a_factor_twice_in_one_tensor_is_whole() -> None:
    assert parse("i i -> i").whole == {"i"}


def test_an_operand_that_is_not_read() -> None:
    found = bind(parse("..., * -> ..."), [(3, 4), (7, 5, 6)], [(3, 4)])
    assert found.operands == ((("d0",), ("d1",)), None)
    assert parse("..., [*] -> ...").optional == {1}


def test_an_operand_of_which_only_the_layout_is_read() -> None:
    rule = bind(parse("*..., [] -> ..."), [(2, 3), ()], [(2, 3)])
    assert rule.operands == ((("d0",), ("d1",)), ())
    assert rule.unread == {0}
    layout = Layout(Mesh({"x": 2, "y": 2}), (2, 3), P("x", partial={"y": "max"}))
    call = Call("fill", tuple(TensorArg(shape, "float32") for shape in ((2, 3), ())), {},
                (TensorArg((2, 3), "float32"),))
    decision = decide(rule, call, [layout, Layout.replicated(layout.mesh, ())], [True, True])
    assert decision.operands[0] is layout
    assert decision.results == (layout.without_partial(),)


def test_operands_and_results_without_dims() -> None:
    rule = bind(parse(", b -> b,"), [(), (3,)], [(3,), ()])
    assert rule.operands == ((), (("b",),))
    assert rule.results == ((("b",),), ())


def test_along_a_dim_a_tensor_without_dims_is_a_line_of_one_element() -> None:
    pattern = parse("... s!, i -> ... i")
    rule = bind(pattern, [(4, 3), ()], [(4, 1)], along=(1,))
    assert (rule.operands, rule.results) == (((("d0",), ("s",)), ()), ((("d0",), ("i",)),))
    rule = bind(pattern, [(), (1,)], [()], along=(0,))
    assert (rule.operands, rule.results) == (((), (("i",),)), ((),))


def test_tensors_of_a_list_one_by_one() -> None:
    pattern = parse("a! b!, i, j i -> j i")
    assert operand_places(pattern, 3, (1, 2)) == (0, 1, 2)
    assert operand_places(pattern, 4, (1, 3)) is None


def test_a_dim_that_always_has_size_one() -> None:
    rule = bind(parse("b 1 -> b"), [(3, 1)], [(3,)])
    assert rule.operands == ((("b",), ()),)


def _call(op: str, shapes: list[tuple[int, ...]], counts: tuple[int, ...], *results: int) -> Call:
    tensors = [TensorArg(shape, "float32") for shape in shapes]
    made = tuple(TensorArg((2,) * ndim, "float32") for ndim in results)
    return Call(op, tuple(tensors), {}, made, ("x", "y", "z"), counts)


def test_a_list_may_be_named_tensor_by_tensor() -> None:
    call = _call("aten.gradient", [(2, 2), (2,), (2,)], (1, 2), 2)
    found = rule("m n, m!, n! -> m n").bind(call, [])
    assert found is not None and found.operands[1:] == ((("m",),), (("n",),))


def test_an_op_may_lack_parameters_that_the_string_marks_optional() -> None:
    found = rule("b i, [b], [b] -> b").bind(_call("aten.rank", [(2, 2)], (1,), 1), [])
    assert found is not None and found.operands == ((("b",), ("i",)),)


def test_dims_of_results_tell_which_string_serves() -> None:
    written = rule("... m n -> ... m q, ... q", "... m n -> none!, ... q")
    for ndim, first in ((3, ("d0",)), (1, ("none",))):
        found = written.bind(_call("aten.qr", [(2, 2, 2)], (1,), ndim, 2), [])
        assert found is not None and found.results[0][0] == first


@pytest.mark.parametrize(
    ("text", "offender"),
    [
        ("a b", "a b"), ("a -> b -> c", "a -> b -> c"), ("a ? -> a", "?"),
        ("*a, a -> a", "*a, a"), ("a:max -> a", "a:max"),
        ("a:most -> ", "a:most"), ("(a (b) -> a", "("),
    ],
)
def test_strings_that_are_none(text: str, offender: str) -> None:
    with pytest.raises(PlacementError) as caught:
        parse(text)
    assert f"Offenders: {offender}" in str(caught.value)


def test_sizes_that_disagree_name_every_factor() -> None:
    with pytest.raises(LayoutError) as caught:
        bind(parse("m k, k n -> m n"), [(5, 4), (3, 2)], [(6, 2)])
    assert str(caught.value) == (
        "rule 'm k, k n -> m n': shapes [(5, 4), (3, 2), (6, 2)] do not fit.\n"
        "  Rule: a rule names every dim of every tensor operand and result, and a factor has one "
        "size.\n"
        "  Offenders: k: 4 and 3, m: 5 and 6\n"
        '  Fix: weft.register_rule(op, "b i, i o -> b o")'
    )


@pytest.mark.parametrize(
    ("text", "operands", "results"),
    [
        ("a -> a", [(2, 3)], [(2,)]), ("a -> a", [(2,), (3,)], [(2,)]),
        ("... a b -> ...", [(2,)], [()]), ("(a b) -> b a", [(6,)], [(4, 2)]),
        ("(a b) -> ", [(6,)], [()]),
    ],
)
def test_shapes_that_do_not_fit(text: str, operands: list, results: list) -> None:
    with pytest.raises(LayoutError):
        bind(parse(text), operands, results)


def test_a_call_finds_its_tensors_in_order() -> None:
    a, b, c = (TensorArg((size,), "float32") for size in (1, 2, 3))
    call = Call("aten.cat.default", ([a, b], 0), {"other": c}, (a,), ("tensors", "dim", "last"))
    assert call.tensors == (a, b, c) and call.base == "cat"
    assert call.get("dim", 7) == 0
    assert call.get("other") == c
    assert call.get("last", 7) == call.get("none", 7) == 7


def test_an_argument_tells_the_size_of_a_factor() -> None:
    x, weight, out = (TensorArg(shape, "float32") for shape in ((5, 6), (4, 3), (5, 4)))
    told = rule("b (g k), (g n) k -> b (g n)", counts={"groups": "g"})
    call = Call("test.op", (x, weight, 2), {}, (out,), ("x", "weight", "groups"))
    bound = told.bind(call, [])
    assert bound is not None and bound.counts == {2: "g"}
    assert {name: bound.sizes[name] for name in "gkn"} == {"g": 2, "k": 3, "n": 2}


def test_lists_may_be_named_by_their_tensors() -> None:
    x, h, c = (TensorArg(shape, "float32") for shape in ((5, 6), (5, 3), (5, 2)))
    call = Call("test.op", (x, [h, c]), {}, (h,), ("x", "states"), (1, 2))
    bound = rule("b i!, b h, b c! -> b h").bind(call, [])
    assert bound is not None
    assert bound.operands[2] == (("b",), ("c",))


@pytest.mark.parametrize(
    ("dtype", "linear", "moves"),
    [("float32", ((0,),), True), ("float64", ((0,),), False), ("int32", (), False)],
)
def test_elements_that_move_to_another_dtype_are_sums(
    dtype: str, linear: tuple[tuple[int, ...], ...], moves: bool
) -> None:
    call = Call("", (TensorArg((3,), "float32"),), {}, (TensorArg((3,), dtype),))
    found = rule("... -> ...", linear=[0], moves=True).bind(call, [False])
    assert found is not None
    assert (found.linear, found.moves) == (linear, moves)


def test_a_factor_that_is_sharded_beside_another() -> None:
    pattern = parse("... s d!, ... t~s d! -> ... s d")
    assert pattern.finish == {(1, "t")}
    assert pattern.beside == {(1, "t", "s")}
    rule = bind(pattern, [(2, 5, 4), (2, 7, 4)], [(2, 5, 4)])
    assert rule.beside == {(1, "t", "s")} and not rule.reduce
    with pytest.raises(PlacementError, match="sharded beside"):
        parse("s d, t~u d -> s d")


def test_a_window_by_a_table() -> None:
    """Its factor has the result's length; cuts follow in proportion, and even ones stay even."""
    table = Table((0, 0, 1, 1, 2, 2), (1, 2, 2, 3, 3, 3), 3)
    rule = bind(parse("b @y -> b y"), [(4, 3)], [(4, 6)], tables={"y": table})
    assert rule.sizes["y"] == 6 and rule.windows == {(0, "y"): table}
    assert table.units((0, 1, 2, 3), 6) == (0, 2, 4, 6)
    assert table.cuts((0, 2, 4, 6), 3) == (0, 1, 2, 3)
    assert table.reads((0, 2, 4, 4), (0, 1, 2, 3)) == ((0, 2), (1, 3), (2, 2))
