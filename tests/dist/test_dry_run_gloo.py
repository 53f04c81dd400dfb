"""A dry run of a pipeline says what its second step does over gloo: collectives, messages, memory.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from typing import Any

import pytest
from torch import distributed

import weft
from tests.gloo import GlooWorld
from tests.second_step import Step, facts, second_step

NAMES = {"recv": "recv", "allreduce": "all_reduce"}


def train(schedule: str) -> None:
    importlib.import_module("pipeline").sharded(4, schedule)


def over_gloo(mesh: Any, schedule: str) -> tuple[Step, list[tuple[str, int]]]:
    """The step, and messages and sums between stages that torch is asked for, with their bytes."""
    asked: list[tuple[str, int]] = []
    counts: list[bool] = []
    groups = distributed.ProcessGroup

    def counted(name: str, original: Any) -> Any:
        def run(group: Any, tensors: Any, *args: Any) -> Any:
            first, second, *_ = distributed.get_process_group_ranks(group)
            if counts and second - first == 2:  # stages are two ranks apart
                asked.append((NAMES[name], sum(one.nbytes for one in tensors)))
            return original(group, tensors, *args)

        return run

    with ExitStack() as stack:
        for name in NAMES:
            stack.callback(setattr, groups, name, vars(groups)[name])  # as it is: it binds
            setattr(groups, name, counted(name, getattr(groups, name)))
        return second_step(lambda: train(schedule), lambda: counts.append(True)), asked


@pytest.mark.parametrize("schedule", ["gpipe", "zero"])
def test_a_pipeline_as_over_gloo(gloo: GlooWorld, schedule: str) -> None:
    real = gloo.run(over_gloo, {"all": 4}, schedule)
    for rank in (0, 3):
        step, asked = real[rank]
        dry = weft.dry_run(lambda _: train(schedule), {"pp": 2, "tp": 2}, rank=rank)
        found = [facts(event) for event in dry.log.events]
        messages = [one for one in found if one[0].startswith("torch.distributed.")]
        assert [one for one in found if one not in messages] == step.events
        # Of two ranks, a sum takes as much as a message.
        assert [(one[5], one[6]) for one in messages] == asked
        assert len([one for one in dry.recorded if one.op == "send"]) == 4
        assert dry.memory.peak == pytest.approx(step.peak, rel=0.01)
