"""Losses equal the one-process result, forward and backward, in every layout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from tests.cases import Trial, trials_of
from tests.cases.loss import CASES, WITHOUT_META
from tests.harness import check_trial
from weft import Shard


@pytest.mark.parametrize("trial", trials_of(CASES + WITHOUT_META), ids=lambda trial: trial.id)
def test_loss(trial: Trial) -> None:
    check_trial(trial)


def test_strict_lets_a_mean_of_elements_be_and_refuses_to_count_targets() -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
        target = weft.distribute_tensor(torch.zeros(4, dtype=torch.int64), mesh, [Shard(0)])
        with weft.strict():
            F.mse_loss(x, x)
            F.cross_entropy(x, target, reduction="sum")
            with pytest.raises(weft.StrictError, match="sent over"):
                F.cross_entropy(x, target)

    weft.testing.run(on_rank, 2)


def test_weights_of_classes_have_no_gradient_as_in_torch() -> None:
    """Beside a shard without classes, too: all ranks raise, and none waits."""
    def on_rank(mesh: Any) -> str:
        layout = weft.Layout(mesh, (6, 5), weft.P(None, "x"), sizes={1: (3, 0, 2)})
        x = weft.distribute_tensor(torch.rand(6, 5), mesh, layout).requires_grad_()
        weight = weft.distribute_tensor(torch.rand(5), mesh, weft.P()).requires_grad_()
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'we"):
            F.cross_entropy(x, torch.arange(6) % 5, weight)
        return "raised"

    assert weft.testing.run(on_rank, 3, {"x": 3}) == ["raised"] * 3
