"""The examples of parallel training: losses of every step are those of one process."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.gloo import GlooWorld

CASES = [
    "data_parallel", "tensor_parallel", "fully_sharded", "two_dim", "sequences", "ragged",
    "experts", "pipeline gpipe", "pipeline 1f1b", "pipeline zero",
    "owners shampoo",
]


def losses(mesh: Any, case: str) -> list[float]:
    name, *schedule = case.split()
    return importlib.import_module(name).sharded(mesh.size(), *schedule)


@pytest.mark.parametrize("case", CASES)
def test_the_losses_are_those_of_one_process(gloo: GlooWorld, case: str) -> None:
    plain, example = (importlib.import_module(each) for each in ("plain", case.split()[0]))
    how = {"optimizer_of": example.how()} if case.startswith("owners") else {}
    due = plain.alone(getattr(example, "model", plain.Transformer), **how)
    assert due[-1] < 0.9 * due[0]
    for found in gloo.run(losses, {"all": 4}, case):
        assert plain.apart(found, due) < 1e-6
