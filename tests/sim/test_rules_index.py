"""Slices, pieces and padding of a sharded dim: where they lie, and what each shard is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.rule_of import rule_of
from weft.core import Layout, Mesh, P
from weft.propagate import decide
from weft.rules import Call, Decision, Rule, TensorArg
from weft.tensor.trace.calls import call_of, overload_named


def _call(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> Call:
    overload = overload_named(op)
    assert overload is not None
    return call_of(overload, args, kwargs, results)


MESH = Mesh({"x": 3})


def decision_of(
    op: str, *args: Any, length: int, results: Sequence[int], sizes: Sequence[int]
) -> Decision:
    """The decision for an op on a tensor of `length` rows by 2, cut into `sizes`."""
    source = TensorArg((length, 2), "float32")
    made = _call(f"aten.{op}", (source, *args), {},
                tuple(TensorArg((size, 2), "float32") for size in results))
    layout = Layout(MESH, (length, 2), P("x"), sizes={0: tuple(sizes)})
    decision = rule_of(made, [layout])
    assert isinstance(decision, Decision)
    assert decision.operands == (layout,), "the operand moved"
    return decision


def local_args(decision: Decision) -> list[tuple[Any, ...]]:
    assert decision.args is not None
    return [decision.args((at,))[0][1:] for at in range(3)]


@pytest.mark.parametrize(
    ("start", "stop", "step", "count", "sizes", "asked"),
    [
        (1, 6, 1, 5, (2, 3, 0), [(0, 1, 3, 1), (0, 0, 3, 1), (0, 0, 0, 1)]),
        (0, 8, 3, 3, (1, 1, 1), [(0, 0, 1, 3), (0, 0, 1, 3), (0, 0, 1, 3)]),
        (-2, 2**63 - 1, 1, 2, (0, 0, 2), [(0, 0, 0, 1), (0, 0, 0, 1), (0, 0, 2, 1)]),
        (5, 2, 1, 0, (0, 0, 0), [(0, 0, 0, 1)] * 3),
    ],
)
def test_a_slice_stays_where_it_lies(
    start: int, stop: int, step: int, count: int, sizes: tuple[int, ...], asked: list
) -> None:
    decision = decision_of("slice.Tensor", 0, start, stop, step, length=8, results=[count],
                           sizes=(3, 3, 2))
    assert decision.results[0].sizes_of(0) == sizes
    assert local_args(decision) == asked


def test_a_slice_of_a_whole_dim_is_called_as_it_is() -> None:
    source = TensorArg((4, 9), "float32")
    made = _call("aten.slice.Tensor", (source, 1, 2, 5), {}, (TensorArg((4, 3), "float32"),))
    layout = Layout(MESH, (4, 9), P("x"))
    decision = rule_of(made, [layout])
    assert isinstance(decision, Decision)
    assert decision.args is None and decision.op is None
    assert str(decision.results[0]) == "[4@x, 3]"


@pytest.mark.parametrize(
    ("op", "args", "pieces"),
    [
        ("split.Tensor", (3,), [3, 3, 2]), ("split_with_sizes.default", ([3, 0, 5],), [3, 0, 5]),
        ("chunk.default", (2,), [4, 4]),
    ],
)
def test_pieces_follow_one_another_in_every_shard(
    op: str, args: tuple[Any, ...], pieces: list[int]
) -> None:
    decision = decision_of(op, *args, length=8, results=pieces, sizes=(1, 6, 1))
    assert decision.op == "aten.split_with_sizes.default"
    for place, (sizes, dim) in enumerate(local_args(decision)):
        assert dim == 0
        due = [result.sizes_of(0)[place] for result in decision.results]
        assert sizes == due


def test_only_the_outer_shards_pad() -> None:
    decision = decision_of("constant_pad_nd.default", [0, 0, 2, 1], 7.0, length=6, results=[9],
                           sizes=(1, 5, 0))
    assert decision.results[0].sizes_of(0) == (3, 5, 1)
    assert [args[0] for args in local_args(decision)] == [
        [0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 1],
    ]


def test_padding_with_a_value_finishes_a_sum() -> None:
    source = TensorArg((4, 2), "float32")
    layout = Layout(MESH, (4, 2), P(partial={"x": "sum"}))
    for value, kept in ((0.0, True), (1.0, False)):
        made = _call("aten.constant_pad_nd.default", (source, [1, 1], value), {},
                    (TensorArg((4, 4), "float32"),))
        decision = rule_of(made, [layout])
        assert isinstance(decision, Decision)
        assert decision.results[0].is_partial == kept == decision.operands[0].is_partial


def test_a_diagonal_shifts_by_the_place_of_the_shard() -> None:
    decision = decision_of("tril.default", 1, length=6, results=[6], sizes=(1, 2, 3))
    assert local_args(decision) == [(1,), (2,), (4,)]


def test_a_short_piece_is_appended_where_the_last_shard_is() -> None:
    """A cache of 100 rows grows by one: nothing but the new row moves."""
    long, short = TensorArg((100, 2), "float32"), TensorArg((1, 2), "float32")
    made = _call("aten.cat.default", ([long, short],), {}, (TensorArg((101, 2), "float32"),))
    layouts = [Layout(MESH, (100, 2), P("x")), Layout(MESH, (1, 2))]
    rule = rule_of(made, layouts)
    assert isinstance(rule, Rule)
    decision = decide(rule, made, layouts, [False, False])
    assert decision.operands[0] is layouts[0]
    assert decision.operands[1].sizes_of(0) == (0, 0, 1)
    assert decision.results[0].sizes_of(0) == (34, 34, 33)


def test_a_mask_has_no_rule() -> None:
    source, mask = TensorArg((6,), "float32"), TensorArg((6,), "bool")
    made = _call("aten.index.Tensor", (source, [mask]), {}, (TensorArg((3,), "float32"),))
    assert rule_of(made, [Layout(MESH, (6,), P("x"))] * 2) is None
