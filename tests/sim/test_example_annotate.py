"""The example of annotations, in miniature: the first steps over four ranks are those of one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

import weft
from weft import ShardTensor
from weft.spmd import Mesh

EXAMPLE = Path(__file__).parents[2] / "examples" / "annotate.py"
STEPS = 4


def example() -> Any:
    spec = importlib.util.spec_from_file_location("annotate", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["annotate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(training: Any) -> tuple[list[float], float]:
    losses = [loss for loss, _ in zip(training.steps(), range(STEPS))]
    return losses, training.accuracy()


def test_the_first_steps_are_those_of_one_process() -> None:
    annotate = example()
    data = annotate.Digits.load()

    def on_rank(_: Any) -> tuple[list[float], float]:
        training = annotate.annotated(data, 1, Mesh(range(4), (2, 2), ("data", "model")))
        up = training.model.blocks[0].up.weight
        assert type(up) is ShardTensor and str(up.sharding) == "[192@model, 48]"
        assert type(training.model.head.weight) is torch.nn.Parameter
        return trained(training)

    losses, accuracy = trained(annotate.Training(data, 1))
    for found, found_accuracy in weft.testing.run(on_rank, 4):
        assert annotate.apart(found, losses) < 1e-6
        assert found_accuracy == accuracy


def test_it_has_three_marks() -> None:
    assert EXAMPLE.read_text().count("mark_sharding(") == 3
