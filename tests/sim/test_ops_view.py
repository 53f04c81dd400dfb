"""Views equal the one-process result, forward and backward, in every layout."""

import pytest

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
