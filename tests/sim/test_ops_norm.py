"""Softmax and normalisations equal the one-process result in every layout."""

from typing import Any

import pytest
import torch

import weft
from tests.cases import Trial, trials_of
from tests.cases.norm import CASES
from tests.harness import check_trial
from weft import P


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_norm(trial: Trial) -> None:
    check_trial(trial)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rms_norm_of_small_numbers(dtype: torch.dtype) -> None:
    """Without an eps of its own it is that of the dtype that torch computes in."""
    x = (torch.randn(5, 6, generator=torch.Generator().manual_seed(0)) / 100).to(dtype)
    expected = torch.nn.functional.rms_norm(x, (6,))

    def on_rank(mesh: Any) -> torch.Tensor:
        cut = weft.distribute_tensor(x, mesh, P(None, "x"))
        return torch.nn.functional.rms_norm(cut, (6,)).full_tensor()

    for found in weft.testing.run(on_rank, mesh={"x": 2}):
        torch.testing.assert_close(found, expected)
