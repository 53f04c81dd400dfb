"""Losses equal the one-process result, forward and backward, in every layout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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


def test_weights_of_classes_have_a_gradient_beside_probabilities() -> None:
    soft = torch.rand(4, 3).softmax(1)

    def gradient(x: Tensor, weight: Tensor) -> Tensor:
        F.cross_entropy(x, soft, weight.requires_grad_()).backward()
        assert weight.grad is not None
        return weight.grad

    def on_rank(mesh: Any) -> Tensor:
        x = weft.distribute_tensor(soft, mesh, weft.P("x"))
        return gradient(x, weft.distribute_tensor(soft[0], mesh, weft.P("x"))).full_tensor()

    expected = gradient(soft, soft[0].clone())
    for found in weft.testing.run(on_rank, 2, {"x": 2}):
        torch.testing.assert_close(found, expected)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_sharded_classes_in_narrow_floats(dtype: torch.dtype) -> None:
    """Logarithms of their probabilities are taken in float32, and weights follow."""
    torch.manual_seed(0)
    scores, target = torch.randn(6, 8).to(dtype), torch.arange(6)
    weight = torch.rand(8).to(dtype)

    def on_rank(mesh: Any) -> tuple[Tensor, Tensor]:
        x = weft.distribute_tensor(scores, mesh, weft.P(None, "x")).detach().requires_grad_()
        loss = F.cross_entropy(x, target, weft.distribute_tensor(weight, mesh, weft.P("x")))
        loss.backward()
        assert x.grad is not None and loss.dtype is dtype
        return loss.full_tensor().detach(), x.grad.full_tensor()

    x = scores.clone().requires_grad_()
    loss = F.cross_entropy(x, target, weight)
    loss.backward()
    for found, grad in weft.testing.run(on_rank, mesh={"x": 3}):
        torch.testing.assert_close(found, loss.detach())
        torch.testing.assert_close(grad, x.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
