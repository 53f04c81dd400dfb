"""Indexed writes, writes to sums, `out=` and plain targets equal the one-process result."""

import pytest

from tests.cases import Trial, trials_of
from tests.cases.writes import CASES
from tests.harness import check_trial


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_writes(trial: Trial) -> None:
    check_trial(trial)
