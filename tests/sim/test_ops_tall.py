"""Factorizations of tall matrices equal the one-process result in every layout."""

from typing import Any

import pytest
import torch

import weft
from tests.cases import Trial, trials_of
from tests.cases.tall import CASES
from tests.harness import check_trial, ranks
from weft import P


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_tall(trial: Trial) -> None:
    check_trial(trial)


def test_matrices_that_are_not_tall_after_some_that_are() -> None:
    """Ranks whose shard is empty decide anew; all ranks decide alike, and R has as many rows."""
    torch.manual_seed(0)
    every = [torch.randn(num, 4, dtype=torch.float64) for num in (24, 4, 2, 24)]
    due = [(torch.linalg.qr(x).R, torch.linalg.svdvals(x)) for x in every]

    @ranks(x=3)
    def run(mesh: Any) -> None:
        for grad in (False, True):
            for x, wanted in zip(every, due):
                x = weft.distribute_tensor(x, mesh, P("x")).requires_grad_(grad)
                for one, plain in zip((torch.linalg.qr(x).R, torch.linalg.svdvals(x)), wanted):
                    torch.testing.assert_close(one.full_tensor(), plain)

    run()
