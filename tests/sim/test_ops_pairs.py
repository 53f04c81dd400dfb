"""Distances, counts and losses by sequences equal the one-process result in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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
