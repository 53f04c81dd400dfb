"""Views and their bases see each other's writes as in one process, in every layout."""

import pytest

from tests.cases import Trial, trials_of
from tests.cases.views import CASES
from tests.harness import check_trial


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_views(trial: Trial) -> None:
    check_trial(trial)
