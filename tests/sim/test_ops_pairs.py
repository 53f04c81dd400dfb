"""Distances, counts and losses by sequences equal the one-process result in every layout."""

import pytest

from tests.cases import Trial, trials_of
from tests.cases.pairs import CASES
from tests.harness import check_trial


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_pairs(trial: Trial) -> None:
    check_trial(trial)
