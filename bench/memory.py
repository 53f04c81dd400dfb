"""Memory while batch, sequence length and learning rate change at every step.

Recipes are kept per layout, so that a training run which never repeats a size could fill the
memory. The peaks of the Python memory in the first and the second half of the run are compared:
a cache that is bounded has reached its bound in the first.
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
from bench.item import Figure, Item, Row
from weft import ShardTensor

NUM_STEPS = 10_000
WIDTH = 4
BYTES_PER_STEP = 16.0
"""The most by which the peak may rise, per step of the second half."""


def step(mesh: Any, weight: Tensor, rows: int, length: int, rate: float) -> None:
    """One training step on `rows` x `length` tokens of each rank."""
    local = torch.ones(rows, length, WIDTH)
    shape = (rows * mesh.size(), length, WIDTH)
    spec = weft.P(mesh.axis_names[0])
    x = ShardTensor.from_local(local, mesh, spec, sizes="chunk", shape=shape)
    loss = F.softmax(F.linear(x, weight), -1).square().mean()
    loss.backward()
    with torch.no_grad():
        weight.add_(weight.grad, alpha=-rate)
    weight.grad = None


def kept_bytes_per_step(mesh: Any, num_steps: int, seed: int = 0) -> float:
    """By how much the peak rises from the first to the second half, per step of a half."""
    draw = random.Random(seed)
    weight = ShardTensor.from_local(torch.eye(WIDTH), mesh, weft.P()).requires_grad_()
    peaks = []
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(2):
            tracemalloc.reset_peak()
            for _ in range(num_steps // 2):
                step(mesh, weight, draw.randint(1, 200), draw.randint(1, 100), draw.random())
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    return (peaks[1] - peaks[0]) / (num_steps // 2)


def _measure(_: int) -> list[Row]:
    start = time.perf_counter()
    kept = kept_bytes_per_step(world.weft_line(), NUM_STEPS)
    per_step = (time.perf_counter() - start) / NUM_STEPS * 1e6
    figures = [Figure("kept per step", kept, BYTES_PER_STEP, "B")]
    note = f"{NUM_STEPS} steps, every batch, length and rate new; time is with memory traced"
    return [Row("changing sizes", {"weft, traced": per_step}, figures, note)]


ITEM = Item("memory", _measure)
