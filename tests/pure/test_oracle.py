"""The oracle passes right results and fails each kind of wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.oracle import Held, block, check, check_gradient, coordinates, order
from weft.core import Layout, Mesh, P

GRID = Mesh({"dp": 2, "tp": 2})
CUT = Layout(GRID, (5, 4), P("dp", "tp"))
RAGGED = Layout(GRID, (5, 4), P(("tp", "dp")), sizes={0: (0, 3, 1, 1)})
SUM = Layout(GRID, (5, 4), P("dp", partial={"tp": "sum"}))
WHOLE = Layout(GRID, (5, 4))
EVERY = [CUT, RAGGED, SUM, WHOLE]


def dense(seed: int = 0) -> Tensor:
    """Whole numbers, so that sums of terms are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, (5, 4), generator=generator).double()


def right(layout: Layout, value: Tensor | None = None) -> list[Held]:
    """What the ranks hold when all is well; terms of a sum are 3, then value - 3."""
    value = dense() if value is None else value
    out = []
    for place in coordinates(layout):
        local = block(layout, value, place)
        if any(layout.partial):
            local = torch.full_like(local, 3) if place[1] == 0 else local - 3
        out.append(
            Held(layout, local, value, tuple(value.shape), value.dtype, tuple(value.stride()))
        )
    return out


@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_right_results_pass(layout: Layout) -> None:
    check(dense(), right(layout))


def test_blocks_are_those_of_hand_calculation() -> None:
    rows = torch.arange(5.0)[:, None].expand(5, 4).contiguous()
    held_rows = [block(RAGGED, rows, place)[:, 0].tolist() for place in coordinates(RAGGED)]
    assert held_rows == [[], [3.0], [0.0, 1.0, 2.0], [4.0]]
    twice = Layout(GRID, (5, 4), P(("dp", "tp")))
    held_rows = [block(twice, rows, place)[:, 0].tolist() for place in coordinates(twice)]
    assert held_rows == [[0.0, 1.0], [2.0], [3.0], [4.0]]


def swapped(held: list[Held]) -> list[Held]:
    first, last = held[0].local, held[3].local
    return [replace(held[0], local=last), *held[1:3], replace(held[3], local=first)]


def one_rank_missing(held: list[Held]) -> list[Held]:
    return held[:3]


def one_value_off(held: list[Held]) -> list[Held]:
    held[2].local.view(-1)[0] += 1e-6
    return held


def other_dtype(held: list[Held]) -> list[Held]:
    return [replace(one, local=one.local.float()) for one in held]


def claimed_dtype(held: list[Held]) -> list[Held]:
    return [replace(one, dtype=torch.float32) for one in held]


def whole_not_reduced(held: list[Held]) -> list[Held]:
    return [replace(one, full=one.full * 2) for one in held]


def one_rank_disagrees(held: list[Held]) -> list[Held]:
    other = WHOLE if held[1].layout is not WHOLE else CUT
    return [*held[:1], replace(held[1], layout=other), *held[2:]]


def other_shape(held: list[Held]) -> list[Held]:
    return [replace(one, shape=(4, 5)) for one in held]


def transposed_strides(held: list[Held]) -> list[Held]:
    return [replace(one, stride=(1, 5)) for one in held]


def wrong_placement(held: list[Held]) -> list[Held]:
    """The blocks of one layout under the name of another."""
    other = Layout(GRID, (5, 4), P("tp", "dp")) if held[0].layout == CUT else CUT
    return [replace(one, layout=other) for one in held]


def local_of_one_row_more(held: list[Held]) -> list[Held]:
    return [replace(one, local=torch.cat([one.local, one.local[:1]])) for one in held]


WRONG = [
    swapped, one_rank_missing, one_value_off, other_dtype, claimed_dtype, whole_not_reduced,
    one_rank_disagrees, other_shape, transposed_strides, wrong_placement, local_of_one_row_more,
]


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("layout", [CUT, RAGGED, SUM], ids=str)
def test_wrong_results_fail(layout: Layout, spoil: Callable[[list[Held]], list[Held]]) -> None:
    with pytest.raises(AssertionError):
        check(dense(), spoil(right(layout)))


def test_a_missing_reduction_fails() -> None:
    """Terms called replicated, and terms of which one was counted twice."""
    terms = right(SUM)
    finished = Layout(GRID, (5, 4), P("dp"))
    with pytest.raises(AssertionError, match="rank 0"):
        check(dense(), [replace(one, layout=finished) for one in terms])
    with pytest.raises(AssertionError, match="rank 0"):
        check(dense(), [replace(one, local=one.local * 2) for one in terms])


def test_replicas_that_drifted_apart_fail() -> None:
    held = right(WHOLE)
    held[3] = replace(held[3], local=held[3].local + 1)
    with pytest.raises(AssertionError, match="rank 3"):
        check(dense(), held)


@pytest.mark.parametrize("kind, terms", [
    ("sum", [[1.0, -2.0], [3.0, 5.0]]), ("avg", [[2.0, 2.0], [6.0, 4.0]]),
    ("max", [[4.0, -9.0], [-1.0, 3.0]]), ("min", [[4.0, 3.0], [9.0, 8.0]]),
    ("product", [[2.0, -3.0], [2.0, -1.0]]),
])
def test_terms_are_reduced_by_their_kind(kind: str, terms: list[list[float]]) -> None:
    mesh = Mesh({"x": 2})
    layout = Layout(mesh, (2,), P(partial={"x": kind}))
    value = torch.tensor([4.0, 3.0], dtype=torch.float64)
    held = [
        Held(layout, torch.tensor(term, dtype=torch.float64), value, (2,), value.dtype, (1,))
        for term in terms
    ]
    check(value, held)
    with pytest.raises(AssertionError):
        check(value, [replace(one, local=one.local + 1) for one in held])


DUAL = {CUT: CUT, RAGGED: RAGGED, SUM: Layout(GRID, (5, 4), P("dp")), WHOLE: WHOLE}


@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_gradients_have_the_dual_layout(layout: Layout) -> None:
    check_gradient(dense(1), layout, right(DUAL[layout], dense(1)), "gradient")
    check_gradient(None, layout, [None] * 4, "gradient")


@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_wrong_gradients_fail(layout: Layout) -> None:
    good = right(DUAL[layout], dense(1))
    stale = right(DUAL[layout], dense(2))
    wrong: list[list[Held | None]] = [
        [*stale],
        [replace(one, local=one.local * 2, full=one.full * 2) for one in good],
        [*good[:3], None],
        [None] * 4,
        [replace(one, layout=None) for one in good],
    ]
    if layout is SUM:
        wrong.append([*right(SUM, dense(1))])
    for one in wrong:
        with pytest.raises(AssertionError):
            check_gradient(dense(1), layout, one, "gradient")
    with pytest.raises(AssertionError):
        check_gradient(None, layout, [*good], "gradient")


def test_plain_operands_get_plain_reduced_gradients() -> None:
    value = dense()
    plain = [Held(None, value, value, (5, 4), value.dtype, (4, 1))] * 4
    check_gradient(value, None, plain, "gradient")
    unreduced = replace(plain[0], local=value / 2)
    with pytest.raises(AssertionError, match="rank 2"):
        check_gradient(value, None, [*plain[:2], unreduced, plain[3]], "gradient")
    with pytest.raises(AssertionError):
        check_gradient(value, None, right(WHOLE), "gradient")


def test_stride_order_ignores_what_has_none() -> None:
    assert order((12, 4, 1), (2, 3, 4)) == [0, 1, 2]
    assert order((1, 2, 6), (2, 3, 4)) == [2, 1, 0]
    assert order((99, 4, 1), (1, 3, 4)) == [1, 2] and order((0, 4, 1), (2, 3, 4)) == [1, 2]
    assert order((1, 1), (0, 3)) == []
