"""Factor strings: what they parse to, what they bind to, and what is refused."""

import pytest

from weft.errors import LayoutError, PlacementError
from weft.rules import Call, TensorArg, parse


def test_a_matrix_product() -> None:
    rule = parse("m k, k n -> m n").bind([(5, 4), (4, 3)], [(5, 3)], linear=((0,), (1,)))
    assert rule.operands == ((("m",), ("k",)), (("k",), ("n",)))
    assert rule.results == ((("m",), ("n",)),)
    assert {name: rule.sizes[name] for name in "mkn"} == {"m": 5, "k": 4, "n": 3}
    assert rule.reduce == {"k": "sum"}
    assert rule.linear == ((0,), (1,))


def test_leading_dims_broadcast_from_the_right() -> None:
    rule = parse("... k, ... k -> ...").bind([(2, 1, 4), (3, 4)], [(2, 3)])
    assert rule.operands == ((("...2",), (), ("k",)), (("...1",), ("k",)))
    assert rule.results == ((("...2",), ("...1",)),)


def test_compound_dims_find_their_sizes() -> None:
    rule = parse("b (h d), d -> b h d").bind([(2, 20), (4,)], [(2, 5, 4)])
    assert rule.operands[0] == (("b",), ("h", "d"))
    assert rule.sizes["h"] == 5


def test_a_compound_dim_is_led_by_its_first_factor_that_is_longer_than_one() -> None:
    rule = parse("(a b) -> a b").bind([(6,)], [(1, 6)])
    assert rule.operands == ((("b",),),)
    assert "a" in rule.whole


def test_marks() -> None:
    pattern = parse("b s:max t! (h d) -> b h")
    assert pattern.reduce == {"d": "sum", "s": "max"}
    assert pattern.whole == {"t"}


def test_a_factor_twice_in_one_tensor_is_whole() -> None:
    assert parse("i i -> i").whole == {"i"}


def test_operands_and_results_without_dims() -> None:
    rule = parse(", b -> b,").bind([(), (3,)], [(3,), ()])
    assert rule.operands == ((), (("b",),))
    assert rule.results == ((("b",),), ())


def test_a_dim_that_always_has_size_one() -> None:
    rule = parse("b 1 -> b").bind([(3, 1)], [(3,)])
    assert rule.operands == ((("b",), ()),)


@pytest.mark.parametrize(
    ("text", "offender"),
    [
        ("a b", "a b"), ("a -> b -> c", "a -> b -> c"), ("a ? -> a", "?"),
        ("a:max -> a", "a:max"), ("a:most -> ", "a:most"), ("(a (b) -> a", "("),
    ],
)
def test_strings_that_are_none(text: str, offender: str) -> None:
    with pytest.raises(PlacementError) as caught:
        parse(text)
    assert f"Offenders: {offender}" in str(caught.value)


def test_sizes_that_disagree_name_every_factor() -> None:
    with pytest.raises(LayoutError) as caught:
        parse("m k, k n -> m n").bind([(5, 4), (3, 2)], [(6, 2)])
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
        parse(text).bind(operands, results)


def test_a_call_finds_its_tensors_in_order() -> None:
    a, b, c = (TensorArg((size,), "float32") for size in (1, 2, 3))
    call = Call("aten.cat.default", ([a, b], 0), {"other": c}, (a,))
    assert call.tensors == (a, b, c)
    assert call.arg(1, "dim", 7) == 0
    assert call.arg(2, "other") == c
    assert call.arg(5, "dim", 7) == 7
