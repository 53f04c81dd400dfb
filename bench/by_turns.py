"""The ranks of a benchmark: systems that run on all of them by turns, and what rank 0 says.

In each round every system takes its turn on all ranks, each round beginning with another one: a
barrier, then a few calls. The time of a turn is that of its slowest rank: wall time, which on a
busy machine says little. Beside it stands CPU time, to which other processes add less. A fault on
one rank is a fault on all, so that all go on alike.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Times", "anywhere", "as_rank", "by_turns", "fault_of", "heading", "lines", "medians"]

Times = dict[str, dict[str, list[float]]]
"""Per system, the seconds and CPU seconds of each round."""


def as_rank(measure: Callable[[Any], Iterable[Mapping[str, Any]]]) -> None:
    """Measure what this process was asked for, as JSON; rank 0 writes one JSON object per result.

    A thread of gloo's that still lets go of a tensor when Python is gone would end the process: it
    ends here.
    """
    torch.set_num_threads(1)
    gc.freeze()  # what is imported takes a collection 0.2 s to look at, and stays
    for found in measure(json.loads(sys.argv[1])):
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)


def by_turns(
    systems: Mapping[str, Callable[[], Any]], num_rounds: int, calls: int = 1,
    cpu_of: Any = dist.ReduceOp.SUM,
) -> Times:
    """Seconds of a call on its slowest rank, and CPU seconds: of all ranks and their threads
    together, or with MAX of the busiest."""
    turns = list(enumerate(systems.values()))
    spent = torch.zeros(2, len(turns), num_rounds, dtype=torch.float64)
    gc.collect()
    gc.disable()
    try:
        for at in range(num_rounds):
            first = at % len(turns)
            for place, call in turns[first:] + turns[:first]:
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(calls):
                    call()
                spent[1, place, at] = time.process_time() - cpu
                spent[0, place, at] = time.perf_counter() - wall
            gc.collect(0)
    finally:
        gc.enable()
    walls, cpus = (spent / calls).unbind()
    dist.all_reduce(walls, dist.ReduceOp.MAX)
    dist.all_reduce(cpus, cpu_of)
    return {
        name: {"seconds": walls[place].tolist(), "cpu_seconds": cpus[place].tolist()}
        for place, name in enumerate(systems)
    }


def medians(systems: Mapping[str, Callable[[], Any]], num_rounds: int) -> dict[str, list[float]]:
    """Per system the medians of wall time and of CPU time of a turn, in milliseconds."""
    times = by_turns(systems, num_rounds, cpu_of=dist.ReduceOp.MAX)
    return {system: [1e3 * statistics.median(its) for its in found.values()]
            for system, found in times.items()}


def fault_of(result: Callable[[], torch.Tensor], due: torch.Tensor) -> str | None:
    """What goes wrong on any rank, in a line; None if the result is right on all of them."""
    mine = None
    try:
        if not torch.allclose(result(), due, rtol=1e-4, atol=1e-4):
            mine = "its result is wrong"
    except Exception as error:
        mine = f"{type(error).__name__}: {error}".split("\n")[0][:60]
    return anywhere(mine)


def anywhere(mine: str | None) -> str | None:
    """What went wrong on any rank, the first that says so, so that all ranks go on alike."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return next((one for one in found if one is not None), None)


def heading(systems: Sequence[str], rounds: int, width: int) -> str:
    """What stands above the lines."""
    names = "".join(f"{system:>18}" for system in systems)
    return (f"Milliseconds on 2 gloo ranks, wall / CPU, medians of {rounds} rounds\n\n"
            f"{'':{width}}{names}")


def lines(event: Mapping[str, Any], systems: Sequence[str], width: int) -> str:
    """What rank 0 says of one program."""
    times = event["milliseconds"]
    cells = [" / ".join([f"{one:.4g}" for one in times[system]]) if system in times else "-"
             for system in systems]
    text = f"{event['program']:{width}}" + "".join([f"{cell:>18}" for cell in cells])
    if event["fault"] is not None:
        text += f"\n{'':{width}}DTensor: {event['fault']}"
    return text
