"""One of the ranks of `weft bench train`: steps of each system, in turns.

Started as `weft run -n N ranks.py ASKED`, ASKED as JSON; rank 0 writes one JSON object per case.
Before the clock every system trains from the same weights on the same batch: its losses are those
of the others. A turn lasts as long as its slowest rank; CPU time is that of all ranks.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import weft
from bench.training.models import Shape
from bench.training.systems import WAYS, Trained, make

__all__ = ["PARTS", "main", "measured"]

_FIRST = 3
"""Steps before the clock."""


def main() -> None:
    """Measure what this process was asked for."""
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    weft.init_mesh({"all": asked["ranks"]})
    for way, model, shape, part in asked["cases"]:
        found = measured(way, model, Shape(**shape), part, asked["rounds"])
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # as in `bench.redistribution.ranks`


def measured(way: str, model: str, shape: Shape, part: str, rounds: int) -> dict[str, Any]:
    """Rounds of seconds and CPU seconds of each system.

    Raises:
        AssertionError: one has other losses.
    """
    systems: dict[str, Trained] = {}
    for system in WAYS[way].systems:
        try:
            systems[system] = make(system, way, model, shape)
        except KeyError:
            continue
    losses = {
        name: [float(_value(one.step())) for _ in range(_FIRST)] for name, one in systems.items()
    }
    for name, its in losses.items():
        apart = max(abs(one - due) / due for one, due in zip(its, losses["weft"]))
        if apart > 1e-3:
            raise AssertionError(f"{way}, {model}: the losses of {name} are {its}, "
                                 f"those of weft {losses['weft']}")
    return {
        "way": way, "model": model, "part": part,
        "times": _times({name: PARTS[part](one) for name, one in systems.items()}, rounds),
    }


def _value(loss: Any) -> Any:
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def _clip(one: Trained) -> Callable[[], Any]:
    one.backward()
    parameters = list(one.model.parameters())
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9)


def _adamw(one: Trained) -> Callable[[], Any]:
    one.backward()
    return one.optimizer.step


PARTS: dict[str, Callable[[Trained], Callable[[], Any]]] = {
    "step": lambda one: one.step, "clip_grad_norm_": _clip, "AdamW": _adamw,
}
"""What is timed: a whole step, or that part of it."""


def _times(systems: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Per system and round: seconds of a step on its slowest rank, CPU seconds of all ranks."""
    turns = list(enumerate(systems.values()))
    spent = torch.zeros(2, len(turns), rounds, dtype=torch.float64)
    gc.collect()
    gc.disable()
    for at in range(rounds):
        first = at % len(turns)
        for place, step in turns[first:] + turns[:first]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            spent[1, place, at] = time.process_time() - cpu
            spent[0, place, at] = time.perf_counter() - wall
        gc.collect(0)
    gc.enable()
    walls, cpus = spent.unbind()
    dist.all_reduce(walls, dist.ReduceOp.MAX)
    dist.all_reduce(cpus)
    return {
        name: {"seconds": walls[place].tolist(), "cpu_seconds": cpus[place].tolist()}
        for place, name in enumerate(systems)
    }


if __name__ == "__main__":
    main()
