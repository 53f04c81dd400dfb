"""Reads and writes by index and mask: right in every layout, by few bytes, and refused as torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from tests.cases import Trial, trials_of
from tests.cases.picks import CASES
from tests.harness import check_trial, ranks
from tests.sharded import Make, agree
from weft import P


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_picks(trial: Trial) -> None:
    check_trial(trial)


# What is wrong with an index, all ranks say, as torch does.

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8 - 2
NINE = torch.tensor([0, 9, 1, 2])

WRONG: dict[str, Callable[[Any, Make], Any]] = {
    "read": lambda x, make: x[NINE],
    "read_named": lambda x, make: x[make(NINE)],
    "negative": lambda x, make: x[torch.tensor([0, -6])],
    "index_select": lambda x, make: x.index_select(0, NINE),
    "gather": lambda x, make: x.gather(0, NINE[:, None].expand(4, 6)),
    "gather_named": lambda x, make: x.gather(0, make(NINE[:, None].expand(4, 6).contiguous())),
    "take": lambda x, make: x.take(torch.tensor([99])),
    "take_negative": lambda x, make: x.take(torch.tensor([-31])),
    "take_along_nothing": lambda x, make: x[:, :0].take_along_dim(torch.tensor([[0]]), 1),
    "write": lambda x, make: x.detach().index_put_((NINE,), make(X[:1], False)),
    "index_add": lambda x, make: x.index_add(0, NINE, x[:4]),
    "scatter": lambda x, make: x.scatter(0, NINE[:, None].expand(4, 6), 1.0),
    "mask": lambda x, make: x[torch.ones(4, dtype=torch.bool)],
    "mask_of_rows": lambda x, make: x[make(torch.ones(5, 5, dtype=torch.bool))],
    "too_many": lambda x, make: x.detach().__setitem__(x > 0, torch.ones(3).double()),
    "too_few": lambda x, make: x.masked_scatter(x > -9, x[:2]),
    "other_dtype": lambda x, make: x.detach().__setitem__(x > 0, torch.ones(14)),
}


@pytest.mark.parametrize("way", ["uneven", "replicated", "ragged", "both", "one dim"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_index_is_refused_as_torch_does(name: str, way: str) -> None:
    agree(lambda make: WRONG[name](make(X), make), way)


@pytest.mark.parametrize("place", [-1, -30, 30])
def test_places_in_all_of_a_tensor_count_from_the_front(place: int) -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)
        with pytest.raises(IndexError, match="out of bounds"):
            torch.take_along_dim(x, torch.tensor([3, place]))

    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.take_along_dim(X, torch.tensor([3, place]))
    weft.testing.run(on_rank, 2, {"x": 2})


# How much is received.

ROWS, WIDTH, RANKS = 64, 32, 4
ROW = WIDTH * 8
SHUFFLE = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
SOME = torch.arange(0, ROWS, 9).flip(0)
MASK = torch.arange(ROWS) % 3 == 0

BYTES: dict[str, tuple[Callable[[Any, Any], Any], int, int]] = {
    # name: a call with (x, index cut as x), bytes that a rank may receive, forward and backward
    "shuffle": (lambda x, i: x[SHUFFLE], ROWS // RANKS * ROW, ROWS // RANKS * ROW),
    "shuffle_by_cut_index": (lambda x, i: x[i], ROWS // RANKS * (ROW + 16) + 64,
                             ROWS // RANKS * ROW),
    "some_rows": (lambda x, i: x[SOME], 2 * ROW, 2 * ROW),
    "index_select": (lambda x, i: x.index_select(0, SOME), 2 * ROW, 2 * ROW),
    "one_row": (lambda x, i: x[torch.tensor(5)], ROW, ROW),
    "gather": (lambda x, i: x.gather(0, i[:, None].expand(ROWS, WIDTH)),
               ROWS // RANKS * (ROW * 2 + 16) + 64, ROWS // RANKS * ROW),
    "mask": (lambda x, i: x[MASK], 8 * RANKS, 0),
    "mask_of_elements": (lambda x, i: x[x > 0], 8 * RANKS, 0),
    "put_number": (lambda x, i: x.index_put((SOME,), torch.tensor(1.0).double()), 0, 0),
    "put_rows": (lambda x, i: x.index_put((SOME,), torch.ones(len(SOME), WIDTH).double()), 0, 0),
    "segment_sum": (lambda x, i: x.new_zeros(4, WIDTH).index_add(0, i % 4, x), 0, 4 * ROW),
    "sums_of_a_sum": (lambda x, i: x.new_zeros(4, WIDTH).index_add(0, i % 4, x).index_put(
        (i % 3,), x, accumulate=True).scatter_add(0, (i % 2)[:, None].expand(-1, WIDTH), x),
        0, 4 * ROW),
    "scatter_add_of_rows": (
        lambda x, i: torch.zeros_like(x).scatter_add(0, i[:, None].expand(ROWS, WIDTH), x),
        ROWS // RANKS * (ROW + 16) + 64, ROWS // RANKS * ROW),
    "add_shuffled": (lambda x, i: x.index_add(0, SHUFFLE, x), ROWS // RANKS * ROW,
                     ROWS // RANKS * ROW),
}


@pytest.mark.parametrize("name", BYTES)
def test_no_more_than_what_is_named_travels(name: str) -> None:
    call, forward, backward = BYTES[name]

    def on_rank(mesh: Any) -> tuple[int, int]:
        full = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator())
        x = weft.distribute_tensor(full, mesh, P("x"), src_data_rank=None).requires_grad_()
        index = weft.distribute_tensor(SHUFFLE, mesh, P("x"), src_data_rank=None)
        with weft.explain() as log:
            out = call(x, index)
            out.backward(gradient=torch.ones_like(out.detach()))
        there = sum(event.nbytes for event in log.events if event.direction == "forward")
        return there, log.nbytes - there

    for there, back in weft.testing.run(on_rank, RANKS, {"x": RANKS}):
        assert there <= forward and back <= backward


ELEMENTS: dict[str, tuple[Callable[[Any, Any, Any], Any], int]] = {
    # name: a call with (x, values in order, their places), how often x moves forward
    "scatter": (lambda x, s, i: torch.full_like(x, -9).scatter(1, i, s), 1),
    "onto_the_own": (lambda x, s, i: x.scatter(1, i, s), 1),
    "in_place": (lambda x, s, i: torch.zeros_like(x).scatter_(1, i, s), 2),
    "number": (lambda x, s, i: x.scatter(1, i, 2.0), 1),
    "reduce": (lambda x, s, i: x.scatter_reduce(1, i, s, "amax"), 1),
    "gather": (lambda x, s, i: x.gather(1, i), 1),
    "few_places": (lambda x, s, i: x.scatter(1, i[:, :4], s[:, :4]), 1),
    "few_read": (lambda x, s, i: x.gather(1, i[:, :4]), 1),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_a_tensor_comes_to_as_many_places(name: str) -> None:
    """Along a sharded dim, where the places have that dim whole: that is fewer bytes than to bring
    all places to all ranks. Of a few, these are fewer."""
    call, moves = ELEMENTS[name]
    full = torch.randn(4, 400, generator=torch.Generator().manual_seed(0)).double()
    up = torch.randn(4, 400, generator=torch.Generator().manual_seed(1)).double()

    def run(x: Any, up: Any) -> tuple[Any, Any, Any]:
        x.requires_grad_()
        values, places = x.detach().sort(1)
        values.requires_grad_()
        with weft.explain() as log:
            out = call(x, values, places)
        (out * up[:, : out.shape[1]]).sum().backward()
        return log.nbytes, out, x.grad if x.grad is not None else values.grad

    _, *due = run(full.clone(), up)

    def on_rank(mesh: Any) -> None:
        x, there = (weft.distribute_tensor(one, mesh, P(None, "x")) for one in (full, up))
        nbytes, *found = run(x, there)
        for one, other in zip(found, due, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)
        assert nbytes <= moves * 100 * 3 * 8

    weft.testing.run(on_rank, RANKS, {"x": RANKS})


@ranks(x=2)
def test_strict_refuses_what_would_travel(mesh: Any) -> None:
    x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)
    index = weft.distribute_tensor(torch.tensor([4, 0, 2]), mesh, P(), src_data_rank=None)
    for _ in range(2):  # a recipe that is known refuses, too
        with weft.strict(), pytest.raises(weft.StrictError, match="needs of other blocks"):
            x[index]
        x[index]
    with weft.strict():
        assert x[x > 0].shape == (14,)


@ranks(x=2)
def test_explain_says_who_sends(mesh: Any) -> None:
    x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None).requires_grad_()
    with weft.explain() as log:
        x[torch.tensor([4, 0, 2])].sum().backward()
    first = log.events[0]
    assert (first.op, first.axes) == ("aten.index.Tensor", ("x",))
    assert "test_ops_picks" in first.line
    assert any(event.direction == "backward" and event.op == first.op for event in log.events)
