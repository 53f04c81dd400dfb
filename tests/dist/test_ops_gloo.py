"""The shared cases over gloo: the same trials that the simulated ranks run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.cases import Case, Trial, trials
from tests.cases.every import EVERY
from tests.effort import EFFORT
from tests.gloo import GlooWorld
from tests.harness import Outcome, allowances, on_rank, verify

MESH = {"dp": 2, "tp": 2}
BY_NAME = {case.name: case for case in EVERY if not case.may_refuse}
NAMES = sorted(BY_NAME)[:: 1 if EFFORT >= 1 else 5]
NUM_BATCHES = 5


def trial_of(case: Case) -> Trial:
    """One trial of the case on four ranks, the same at every start."""
    return random.Random(case.name).choice(list(trials(case, [MESH])))


def run_cases(mesh: Any, names: list[str]) -> list[Outcome]:
    """What one gloo rank makes of the trials of these cases."""
    outcomes = []
    for name in names:
        with allowances(BY_NAME[name]):
            outcomes.append(on_rank(trial_of(BY_NAME[name]), mesh))
    return outcomes


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_cases_over_gloo(gloo: GlooWorld, batch: int) -> None:
    names = NAMES[batch::NUM_BATCHES]
    of_ranks = gloo.run(run_cases, MESH, names)
    for place, name in enumerate(names):
        verify(trial_of(BY_NAME[name]), [outcomes[place] for outcomes in of_ranks])
