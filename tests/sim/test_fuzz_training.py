"""A sample of random models, tables and steps: `python -m tests.fuzz` has thousands of them."""

from __future__ import annotations

import pytest

from tests import effort
from tests.fuzz.draws import drawn
from tests.fuzz.training import check


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [
    *effort.drawn(range(12)),
    2931,  # a checkpoint whose weights are gathered once for two graphs
    9336,  # a frozen weight in its own dtype under autocast, in a graph whose group has gone
    30397,  # a group whose parameters have taken other layouts is not gathered ahead
])
def test_ranks_train_what_one_process_trains(seed: int) -> None:
    check(drawn(seed))
