"""`examples/fourier.py`: the losses of one process, few bytes, a quarter of the memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft import P
from weft.testing import peak_memory

EXAMPLE = Path(__file__).parents[2] / "examples" / "fourier.py"


@pytest.fixture(scope="module")
def fourier() -> Any:
    spec = importlib.util.spec_from_file_location("fourier", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ranks_send_modes_and_hold_their_share(fourier: Any) -> None:
    line = torch.linspace(0, 1, 129)[:-1]
    with peak_memory() as alone:
        due = fourier.train(fourier.waves(line, line))

    def on_rank(mesh: Any) -> tuple[list[float], int, int]:
        rows, columns = (weft.distribute_tensor(line, mesh, P(axis)) for axis in "xy")
        with peak_memory() as memory, weft.sharded_factories(), weft.explain() as log:
            losses = fourier.train(fourier.waves(rows, columns))
        return losses, log.nbytes, memory.peak

    for losses, nbytes, peak in weft.testing.run(on_rank, mesh={"x": 2, "y": 2}):
        torch.testing.assert_close(losses, due)
        assert nbytes < 650_000  # of a field of any size
        assert peak <= 1.5 * alone.peak / 4
