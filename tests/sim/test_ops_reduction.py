"""Sums, means and extrema equal the one-process result, forward and backward, in every layout."""

from typing import Any

import pytest
import torch

import weft
from tests.cases import Trial, trials_of
from tests.cases.reduction import CASES
from tests.harness import check_trial
from weft import P


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_reduction(trial: Trial) -> None:
    check_trial(trial)


@pytest.mark.filterwarnings("error::weft.WeftWarning")
def test_what_distributions_ask_of_their_arguments_moves_none_of_them() -> None:
    signs = torch.arange(7) - 3

    def fn(mesh: Any) -> None:
        for full in (signs > 0, signs > -9, signs > 9, signs[:0] > 0):
            x = weft.distribute_tensor(full, mesh, P("dp"))
            for function in (torch._is_all_true, torch._is_any_true):
                found: Any = function(x)
                assert found.sharding.partial and found.item() == function(full).item()

    weft.testing.run(fn, 4, {"dp": 4})
