"""What comes from known places equals the one-process result in every layout."""

import pytest

from tests.cases import Trial, trials_of
from tests.cases.places import CASES
from tests.harness import check_trial


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_places(trial: Trial) -> None:
    check_trial(trial)
