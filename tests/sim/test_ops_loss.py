"""Losses equal the one-process result, forward and backward, in every layout."""

import pytest

from tests.cases import Trial, trials_of
from tests.cases.loss import CASES, WITHOUT_META
from tests.harness import check_trial


@pytest.mark.parametrize("trial", trials_of(CASES + WITHOUT_META), ids=lambda trial: trial.id)
def test_loss(trial: Trial) -> None:
    check_trial(trial)
