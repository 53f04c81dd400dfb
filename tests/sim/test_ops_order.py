"""Sorts, order statistics, extrema and their places, moments, norms and counts equal the
one-process result, forward and backward, in every layout."""

import pytest

from tests.cases import Trial, trials_of
from tests.cases.order import CASES
from tests.harness import check_trial


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_order(trial: Trial) -> None:
    check_trial(trial)
