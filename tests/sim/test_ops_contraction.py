"""Matrix products equal the one-process result, forward and backward, in every layout."""

from typing import Any

import pytest
import torch

import weft
from tests.cases import Trial, trials_of
from tests.cases.contraction import CASES
from tests.harness import check_trial
from weft import P


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_contraction(trial: Trial) -> None:
    check_trial(trial)


def test_factors_of_integers() -> None:
    """torch cuts them to integers, but raises where it sums over nothing, as one rank would."""
    left, right = torch.arange(20).view(4, 5), torch.arange(15).view(5, 3)
    due = torch.addmm(torch.ones(4, 3, dtype=torch.long), left, right, beta=1.6, alpha=2.7)

    def on_rank(mesh: Any) -> torch.Tensor:
        a, b = (
            weft.ShardTensor.from_local(
                one.split((4, 0, 1), dim)[mesh.here[0]], mesh, spec, sizes={dim: (4, 0, 1)})
            for one, spec, dim in ((left, P(None, "x"), 1), (right, P("x"), 0))
        )
        bias = torch.ones(4, 3, dtype=torch.long)
        return torch.addmm(bias, a, b, beta=1.6, alpha=2.7).full_tensor()

    for found in weft.testing.run(on_rank, mesh={"x": 3}):
        assert torch.equal(found, due)


def test_fewer_heads_than_ranks_leave_no_rank_idle() -> None:
    """Scores written out, of two heads on four ranks: each rank has its own queries. To exchange
    positions for heads takes as many bytes, but two ranks would have nothing to do."""
    def on_rank(mesh: Any, heads: int) -> Any:
        q, k, v = (
            weft.distribute_tensor(torch.randn(1, heads, 16, 3), mesh, P(None, None, "x"))
            .requires_grad_() for _ in range(3))
        return ((q @ k.mT).softmax(-1) @ v).sharding.spec

    for heads, spec in ((2, P(None, None, "x")), (4, P(None, "x"))):
        found = weft.testing.run(lambda mesh, n=heads: on_rank(mesh, n), mesh={"x": 4})
        assert set(found) == {spec}


@pytest.mark.parametrize("heads", [1, 3])
def test_scores_added_to_a_bias_of_the_keys_stay_with_the_queries(heads: int) -> None:
    """As without: queries and keys cost the same, and softmax reads a row of scores. A bias as
    BLOOM's has no rows."""
    def on_rank(mesh: Any) -> Any:
        q, k = (
            weft.distribute_tensor(torch.randn(heads, 16, 3), mesh, P(None, "x")).requires_grad_()
            for _ in range(2))
        return torch.baddbmm(torch.ones(heads, 1, 16), q, k.mT).sharding.spec

    assert set(weft.testing.run(on_rank, mesh={"x": 4})) == {P(None, "x")}
