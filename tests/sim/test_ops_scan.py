"""Scans equal the one-process result, forward and backward, in every layout."""

import pytest

from tests.cases import Trial, trials_of
from tests.cases.scan import CASES
from tests.harness import check_trial


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_scan(trial: Trial) -> None:
    check_trial(trial)
