"""Factorizations of tall matrices equal the one-process result in every layout."""

import pytest

from tests.cases import Trial, trials_of
from tests.cases.tall import CASES
from tests.harness import check_trial


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_tall(trial: Trial) -> None:
    check_trial(trial)
