"""`weft bench train`: every system trains alike, and what is counted is what a formula says."""

from __future__ import annotations

from typing import Any

import pytest

from bench.collectives import Collectives
from bench.train import _counts, _timed
from bench.training.models import Shape
from bench.training.ranks import measured
from bench.training.systems import WAYS, make
from tests.gloo import GlooWorld

SHAPE = Shape(layers=1, width=64, batch=1, length=8)


def trained(mesh: Any) -> dict[str, Any]:
    return measured("sequences", "blocks", SHAPE, "step", 1)


def test_every_system_trains_alike(
    gloo: GlooWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    found = gloo.run(trained, {"x": 4})[0]
    assert {*found["times"]} == {*WAYS["sequences"].systems}
    assert len(list(_timed(found, SHAPE))) == 1  # to DTensor
    assert len(capsys.readouterr().out.splitlines()) == 3


def summed(mesh: Any, system: str) -> tuple[int, int, int]:
    made = make(system, "data", "blocks", SHAPE)
    made.step()
    with Collectives() as seen:
        made.step()
    nbytes = 4 * sum(one.numel() for one in made.model.parameters())
    return seen.received, seen.num, 2 * nbytes * 3 // 4 + 6  # the loss is a number


def test_bytes_and_collectives_are_counted(gloo: GlooWorld) -> None:
    for nbytes, num, due in gloo.run(summed, {"x": 4}, "by hand"):
        assert (nbytes, num) == (due, 1)


def test_a_model_with_fewer_heads_than_ranks_is_left_out(
    capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake backend gives nothing to a rank that has nothing to send."""
    assert WAYS["sequences"].width_for("Llama", 8) == 256
    assert WAYS["fully sharded x tensor"].width_for("blocks", 8) == 32
    assert [*_counts("sequences", "Llama", 8, SHAPE)] == []
    said = " ".join(capsys.readouterr().out.split())
    assert said == (
        "sequences, Llama x 1, 8 ranks less than a head for each rank: --width 256")
