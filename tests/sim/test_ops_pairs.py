"""Distances, counts and losses by sequences equal the one-process result in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from tests.cases import Trial, trials_of
from tests.cases.pairs import CASES
from tests.harness import check_trial
from weft import P


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_pairs(trial: Trial) -> None:
    check_trial(trial)


@pytest.mark.parametrize("function", [
    torch.histogram, lambda x, borders: torch.histogram(x, borders, density=True),
    lambda x, borders: torch.histogramdd(x, [borders, borders + 0.1]),
])
def test_a_plain_tensor_is_counted_between_borders_that_are_sharded(
    function: Callable[..., Any]
) -> None:
    x, borders = torch.rand(5, 2, dtype=torch.float64), torch.tensor([0.1, 0.4, 0.6, 0.9]).double()

    def flat(found: Any) -> list[torch.Tensor]:
        lines = found[1] if isinstance(found[1], tuple) else [found[1]]
        return [found[0], *lines]

    due = flat(function(x, borders))
    for found in weft.testing.run(lambda mesh: [one.full_tensor() for one in flat(function(
        x, weft.distribute_tensor(borders, mesh, P("x"), src_data_rank=None)
    ))], mesh={"x": 2}):
        for one, other in zip(found, due, strict=True):
            torch.testing.assert_close(one, other)


_LENGTHS = torch.full((5,), 6), torch.tensor([3, 2, 3, 1, 2])


def test_ctc_under_autocast() -> None:
    """In single precision, of lengths that are read, without a gather."""
    def loss(place: Callable[[torch.Tensor], Any]) -> Any:
        scores = torch.linspace(-2, 2, 6 * 5 * 7).view(6, 5, 7).cos().bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            return F.ctc_loss(place(scores), torch.arange(15).view(5, 3) % 6 + 1, *_LENGTHS)

    def on_rank(mesh: Any) -> Any:
        found = loss(lambda full: weft.distribute_tensor(full, mesh, P(None, "x")))
        return found.dtype, found.item()

    due = loss(lambda full: full)
    for dtype, value in weft.testing.run(on_rank, mesh={"x": 2}):
        assert dtype == due.dtype == torch.float32
        assert value == pytest.approx(due.item(), rel=1e-6)


def test_ctc_of_a_sharded_batch_sends_nothing() -> None:
    def on_rank(mesh: Any) -> Any:
        scores = weft.distribute_tensor(torch.zeros(6, 5, 7), mesh, P(None, "x"))
        goals = weft.distribute_tensor(torch.ones(5, 3, dtype=torch.int64), mesh, P("x"))
        with weft.strict():
            found = F.ctc_loss(scores, goals, *(one.tolist() for one in _LENGTHS))  # type: ignore[arg-type]
        return str(found.sharding)

    assert weft.testing.run(on_rank, mesh={"x": 2}) == ["[] partial(sum@x)"] * 2


def test_losses_of_ctc_that_are_read_before_their_backward() -> None:
    """A replicated value shares memory with `full_tensor` until either is written to."""
    def program(mesh: Any) -> None:
        scores = weft.ones(4, 2, 3, mesh=mesh, spec=P()).requires_grad_()
        lengths: Any = [4, 3], [1, 1]
        each = F.ctc_loss(scores, torch.ones(2, 1).long(), *lengths, reduction="none")
        assert each.full_tensor().shape == (2,)
        each.sum().backward()
        assert scores.grad is not None

    weft.testing.run(program, mesh={"x": 2})


def test_ctc_of_a_dtype_that_it_has_no_kernel_for() -> None:
    def on_rank(mesh: Any) -> None:
        scores = weft.distribute_tensor(torch.zeros(6, 5, 7), mesh, P(None, "x"))
        F.ctc_loss(scores.bfloat16(), torch.ones(5, 3, dtype=torch.int64), *_LENGTHS)

    with (
        pytest.raises(NotImplementedError, match=r"ctc_loss.*BFloat16"),
        pytest.warns(weft.WeftWarning, match="not implemented for 'BFloat16'"),
    ):
        weft.testing.run(on_rank, mesh={"x": 2})
