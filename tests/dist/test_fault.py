"""A rank is killed under torchrun; the run goes on from its last checkpoint, with one rank less."""

from __future__ import annotations

from pathlib import Path

from tests.dist.test_exit import torchrun

DRILL = Path(__file__).parents[2] / "examples" / "parallel" / "fault.py"


def test_a_run_survives_a_killed_rank(tmp_path: Path) -> None:
    """The example compares its losses with those of one process, and fails where they differ."""
    done = torchrun(DRILL, str(tmp_path), num_ranks=3, max_restarts=1)
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr and done.stdout.count("one process") == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]
