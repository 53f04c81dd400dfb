"""Random indices read and write what they do in one process, forward and backward."""

import pytest

from tests.cases import Trial, trials_of
from tests.cases.indices import CASES
from tests.harness import check_trial


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_indices(trial: Trial) -> None:
    check_trial(trial)
