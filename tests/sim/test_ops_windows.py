"""Convolutions, pooling and recurrent networks equal the one-process result in every layout."""

import pytest
import torch
import torch.nn.functional as F

import weft
from tests.cases import Trial, trials_of
from tests.cases.windows import CASES
from tests.harness import check_trial
from weft import P


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_windows(trial: Trial) -> None:
    check_trial(trial)


def test_windows_of_shards_that_change_dims_are_one_exchange() -> None:
    """F.unfold puts rows and columns into one dim: shards of columns become shards of rows, with
    the rows around them."""
    x = torch.randn(2, 3, 17, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = x.clone().requires_grad_()
    due = F.unfold(whole, 3, padding=1)
    (of_whole,) = torch.autograd.grad((due ** 2).sum(), whole)

    def on_rank(mesh: weft.Mesh) -> None:
        u = weft.distribute_tensor(x, mesh, P(None, None, "x", "y")).requires_grad_()
        with weft.explain() as log:
            made = F.unfold(u, 3, padding=1)
            (back,) = torch.autograd.grad((made ** 2).sum(), u)
        assert torch.equal(made.full_tensor(), due)
        torch.testing.assert_close(back.full_tensor(), of_whole, rtol=1e-12, atol=1e-12)
        assert [event.collective for event in log.events if "Reduce" not in event.collective] == [
            "Halo", "HaloSum"]

    weft.testing.run(on_rank, mesh={"x": 2, "y": 2})
