"""Linear algebra on batches equals the one-process result, in every layout."""

from typing import Any

import pytest
import torch

import weft
from tests.cases import Trial, case, reals, trials_of
from tests.cases.batched import CASES
from tests.harness import check_trial
from weft import P


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_batched(trial: Trial) -> None:
    check_trial(trial)


# A block of 3 rows would say another dim.
OF_ROWS = case("cross_of_rows", lambda a, b: torch.cross(a, b), reals(5, 3), reals(5, 3),
               per_mesh=6)


@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim")
@pytest.mark.parametrize("trial", trials_of([OF_ROWS]), ids=lambda trial: trial.id)
def test_cross_without_a_dim(trial: Trial) -> None:
    check_trial(trial)


def test_complex_svd_of_nothing() -> None:
    """Its derivative reads a number, which meta tensors have not."""
    def on_rank(mesh: Any) -> tuple[int, ...]:
        x = weft.distribute_tensor(torch.zeros(0, 0, dtype=torch.complex64), mesh, P(None, "x"))
        x.requires_grad_()
        torch.linalg.svd(x).S.sum().backward()
        return tuple(x.grad.shape)

    assert weft.testing.run(on_rank, mesh={"x": 2}) == [(0, 0)] * 2
