"""Attention equals the one-process result, forward and backward, in every layout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from tests.cases import Trial, trials_of
from tests.cases.attention import CASES
from tests.harness import check_trial, ranks
from weft import P


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_attention(trial: Trial) -> None:
    check_trial(trial)


@pytest.mark.parametrize("more", [{"enable_gqa": True}, {"attn_mask": torch.ones(5, 5).bool()}],
                         ids=["grouped", "broadcast"])
@ranks(dp=3)
def test_few_samples_with_one_head_of_keys_stay(mesh: Any, more: dict[str, Any]) -> None:
    """A rank without samples has nothing to do: no rank needs what another holds."""
    torch.manual_seed(0)
    attention: Any = F.scaled_dot_product_attention
    plain = [torch.randn(2, heads, 5, width).double().requires_grad_()
             for heads, width in ((4, 3), (1, 3), (1, 2))]
    mine = [weft.distribute_tensor(one.detach(), mesh, P("dp")).requires_grad_() for one in plain]
    with weft.explain() as log:
        out, due = (attention(*some, **more) for some in (mine, plain))
        out.square().sum().backward()
    due.square().sum().backward()
    assert all(event.op == "backward" for event in log.events), log.events  # the loss
    torch.testing.assert_close(out.full_tensor(), due)
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
