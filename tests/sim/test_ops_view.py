"""Views equal the one-process result, forward and backward, in every layout."""

from typing import Any

import pytest
import torch

import weft
from tests.cases import Trial, trials_of
from tests.cases.view import CASES
from tests.harness import check_trial
from weft import P


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_view(trial: Trial) -> None:
    check_trial(trial)


def test_rows_of_few_samples_stay_sharded() -> None:
    """A rank receives no more than its part, there and back."""
    def rows(mesh: weft.Mesh) -> tuple[int, str, str]:
        x = weft.zeros(2, 64, 8, mesh=mesh, spec=P(None, "x"))
        with weft.explain() as log:
            joined = x.view(-1, 8)
            back = joined.view(2, 64, 8)
        return log.nbytes, str(joined.sharding), str(back.sharding)

    part = 4 * 2 * 64 * 8 // 4
    for nbytes, joined, back in weft.testing.run(rows, mesh={"x": 4}):
        assert (joined, back) == ("[128@x, 8]", "[2, 64@x, 8]")
        assert nbytes <= 2 * part


@pytest.mark.parametrize("spec", [P(None, None, "x"), P("y", None, "x"), P(None, None, ("x", "y"))])
@pytest.mark.parametrize("length", [13, 16])
def test_lines_of_another_length_stay_sharded(length: int, spec: P) -> None:
    """Scores of relative positions, shifted as XLNet does: a rank sends parts of lines that its
    borders cut, and no others."""
    def shifted(scores: Any) -> Any:
        queries, keys = scores.shape[2:]
        x = scores.reshape(2, 3, keys, queries)[:, :, 1:].reshape(2, 3, queries, keys - 1)
        return x[..., :queries]

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(scores.detach(), mesh, spec).requires_grad_()
        with weft.explain() as log:
            out = shifted(x)
        assert out.sharding.spec == spec
        assert sum([event.nbytes for event in log.events]) <= 2 * 3 * 2 * length * 8 * 2
        out.backward(due)
        assert torch.equal(out.full_tensor(), due) and torch.equal(x.grad.full_tensor(), grad)

    scores = torch.randn(2, 3, length, 2 * length, dtype=torch.float64, requires_grad=True)
    due = shifted(scores)
    (grad,) = torch.autograd.grad(due, scores, due)
    due = due.detach()
    weft.testing.run(on_rank, mesh={"x": 2, "y": 2})
