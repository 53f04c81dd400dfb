"""Memory while batch, sequence length and learning rate change at every step.

Recipes are kept per layout, so that a training run which never repeats a size could fill the
memory. The most that Python holds in the first and in the second half of the run is compared: a
cache that is bounded has reached its bound early in the first, and then rises and falls.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from bench import world
from bench.timing import Figure, Row
from weft import ShardTensor

NUM_STEPS = 10_000
WIDTH = 4
TO_FIRST_HALF = 1.1
"""The most that the second half may hold, to the first; 2 is growth without end."""


def step(mesh: Any, weight: Tensor, rows: int, length: int, rate: float) -> None:
    """One training step on `rows` x `length` tokens of each rank."""
    local = torch.ones(rows, length, WIDTH)
    shape = (rows * mesh.size(), length, WIDTH)
    spec = weft.P(mesh.axis_names[0])
    x = ShardTensor.from_local(local, mesh, spec, sizes="chunk", shape=shape)
    loss = F.softmax(F.linear(x, weight), -1).square().mean()
    loss.backward()
    with torch.no_grad():
        assert weight.grad is not None
        weight.add_(weight.grad, alpha=-rate)
    weight.grad = None


def growth(mesh: Any, num_steps: int, seed: int = 0) -> float:
    """The most memory held in the second half of the steps, over that in the first.

    It is read after a collection, twenty times a half: garbage that waits for one is not growth.
    What the first steps bring for good (modules that torch imports late) is not counted.
    """
    draw = random.Random(seed)
    weight = ShardTensor.from_local(torch.eye(WIDTH), mesh, weft.P()).requires_grad_()
    held = []

    def steps(count: int) -> None:
        for _ in range(count):
            step(mesh, weight, draw.randint(1, 200), draw.randint(1, 100), draw.random())

    steps(10)
    tracemalloc.start()
    try:
        for _ in range(40):
            steps(num_steps // 40)
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return max(held[20:]) / max(held[:20])


def measure(_: int) -> list[Row]:
    start = time.thread_time_ns()
    grown = growth(world.weft_line(), NUM_STEPS)
    per_step = (time.thread_time_ns() - start) / NUM_STEPS / 1e3
    figures = [Figure("second half to first", grown, TO_FIRST_HALF)]
    note = f"{NUM_STEPS} steps, every batch, length and rate new; time is with memory traced"
    return [Row("changing sizes", {"weft, traced": per_step}, figures, note)]
