"""Linear algebra on batches equals the one-process result, in every layout."""

import pytest
import torch

from tests.cases import Trial, case, reals, trials_of
from tests.cases.batched import CASES
from tests.harness import check_trial


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_batched(trial: Trial) -> None:
    check_trial(trial)


# A block of 3 rows would say another dim.
OF_ROWS = case("cross_of_rows", lambda a, b: torch.cross(a, b), reals(5, 3), reals(5, 3),
               per_mesh=6)


@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim")
@pytest.mark.parametrize("trial", trials_of([OF_ROWS]), ids=lambda trial: trial.id)
def test_cross_without_a_dim(trial: Trial) -> None:
    check_trial(trial)
