"""The demo's verdict, its pictures, and how it listens to ranks: all without ranks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from demo import command, follow
from demo.follow import Parameter, Traffic
from demo.text import Corpus
from demo.train import Run, Step
from weft.cli import launch
from weft.core import Layout, Mesh, P

MESH = Mesh({"dp": 2, "tp": 2})
LOSSES = [5.0, 4.0, 3.0, 2.5]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs the command with these losses of four ranks, beside `LOSSES` of one process."""
    monkeypatch.setattr(command, "standard_library", lambda: Corpus([Path(__file__)]))
    monkeypatch.setattr(
        command, "plain", lambda run, corpus: (None, iter(Step(loss, 0.1) for loss in LOSSES))
    )

    def invoke(losses: list[float], *options: str) -> Result:
        def pretend(run: Run, told: follow.Told) -> Iterator[str]:
            layout = Layout(MESH, (5, 4), P("tp"))
            told.parameters.append(Parameter("a.weight", layout))
            told.traffic.append(Traffic("tp", "aten.linear.default", "forward", "AllReduce", 2, 64))
            for loss in losses:
                told.steps.append(Step(loss, 0.2))
                yield ""
            if len(losses) < len(LOSSES):
                raise follow.RanksFailed("rank 3 has no more [memory]")

        monkeypatch.setattr(command, "follow", pretend)
        return CliRunner().invoke(
            command.demo, ["--steps", "4", "--out", str(tmp_path), *options], env={"COLUMNS": "80"}
        )

    return invoke


def test_equal_losses_end_well(demo) -> None:
    result = demo([5.0, 4.0, 3.0, 2.5 * (1 + 0.9e-4)])
    assert result.exit_code == 0, result.output
    assert "at most 9e-05 of their value, in step 3" in result.output


@pytest.mark.parametrize("wrong", [2.5 * (1 + 1.1e-4), 2.5 * (1 - 1.1e-4), math.nan, math.inf])
def test_one_loss_that_differs_ends_with_status_1(demo, wrong: float) -> None:
    for step in range(4):
        losses = [*LOSSES]
        losses[step] *= wrong / 2.5
        result = demo(losses)
        assert result.exit_code == 1, result.output
        assert "NO" in result.output


def test_without_comparison_there_is_nothing_to_fail(demo) -> None:
    result = demo([9.0, 9.0, 9.0, 9.0], "--no-compare")
    assert result.exit_code == 0, result.output
    assert "agreement" not in result.output


@pytest.mark.parametrize("made", [[], [5.0, 4.0]], ids=["at the start", "on the way"])
def test_ranks_that_fail_end_with_status_1_and_their_words(demo, made: list[float]) -> None:
    result = demo(made)
    assert result.exit_code == 1
    assert "rank 3 has no more [memory]" in result.output
    assert "the ranks ended before the last step" in result.output


@pytest.mark.parametrize(
    ("num_steps", "end", "words"), [(2, "sys.exit('why')", "why"), (1, "sys.exit(0)", "1 of 2")],
    ids=["status", "too few steps"],
)
def test_following_ranks_to_a_bad_end(monkeypatch, num_steps: int, end: str, words: str) -> None:
    line = json.dumps({"event": "step", "step": 0, "loss": 1.5, "seconds": 0.5})
    program = f"import sys\nfor _ in range({num_steps}): print({line!r})\n{end}"
    monkeypatch.setattr(launch, "launch_command", lambda *_: [sys.executable, "-c", program])
    told = follow.Told()
    with pytest.raises(follow.RanksFailed, match=words):
        list(follow.follow(Run(num_steps=2), told))
    assert told.steps == [Step(1.5, 0.5)] * num_steps


def test_layouts_travel_as_text() -> None:
    told = follow.Told()
    layouts = [Layout(MESH, (80, 6), P("tp"), sizes={0: (48, 32)}), Layout(MESH, (7,))]
    for layout in layouts:
        follow._take(told, {"event": "parameter", "name": "w", "layout": str(layout)})
    assert told.parameters == [Parameter("w", layout) for layout in layouts]
