"""Systems that run on all ranks by turns: their times, and what goes wrong with one of them.

The time of a turn is that of its slowest rank: wall time, which on a busy machine says little, and
beside it CPU time. A fault on one rank is a fault on all, so that all go on alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["by_turns", "fault_of", "heading", "lines"]


def by_turns(systems: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Per system the medians of wall time and of CPU time of a turn, in milliseconds."""
    taken: dict[str, list[list[float]]] = {system: [] for system in systems}
    for _ in range(rounds):
        for system, turn in systems.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            turn()
            took = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            taken[system].append(took.tolist())
    return {system: [1e3 * statistics.median(its) for its in zip(*found)]
            for system, found in taken.items()}


def fault_of(result: Callable[[], torch.Tensor], due: torch.Tensor) -> str | None:
    """What goes wrong on any rank, in a line; None if the result is right on all of them."""
    mine = None
    try:
        if not torch.allclose(result(), due, rtol=1e-4, atol=1e-4):
            mine = "its result is wrong"
    except Exception as error:
        mine = f"{type(error).__name__}: {error}".split("\n")[0][:60]
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
