"""Random models and tables over processes: all ranks issue the same collectives."""

from __future__ import annotations

import pytest

from tests.fuzz.draws import drawn
from tests.fuzz.training import check
from tests.gloo import GlooWorld


@pytest.mark.filterwarnings("ignore")
def test_processes_train_what_one_trains(gloo: GlooWorld) -> None:
    for seed in (1262, 2931):  # experts, batch norm, a checkpoint; Muon that overflows
        check(drawn(seed), gloo.run)
