"""One of the ranks of `weft bench field`: steps by weft, by gathering, by DTensor, in turns.

Started as `weft run -n N field_ranks.py ASKED`, ASKED as JSON; rank 0 writes one JSON object per
program. The time of a turn is that of its slowest rank. One process alone is rank 0, while the
others wait.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import weft
from bench.faults import fault_of
from bench.field_programs import PROGRAMS, field_of

__all__ = ["main"]

FIRST = 4
"""Steps before the clock: recipes are made, and weft learns what a step reads."""


def main() -> None:
    """Measure what this process was asked for."""
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    mesh = weft.init_mesh({"x": asked["ranks"]})
    for name in asked["programs"]:
        found = _measured(name, asked["size"], asked["rounds"], mesh)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # as in `bench.redistribution.ranks`


def _measured(name: str, size: int, rounds: int, mesh: Any) -> dict[str, Any]:
    systems = {
        "one process": _alone(name, size, mesh), "weft": _weft(name, size, mesh),
        "gathered": _gathered(name, size, mesh),
    }
    due = systems["one process"][1]()
    assert torch.allclose(systems["weft"][1](), due, rtol=1e-4, atol=1e-5)
    dtensor = _dtensor(name, size)
    fault = fault_of(dtensor[1], due)
    faults = {} if fault is None else {"DTensor": fault}
    if fault is None:
        systems["DTensor"] = dtensor
    times: dict[str, list[float]] = {system: [] for system in systems}
    for step, _ in systems.values():
        for _ in range(FIRST):
            step()
    for _ in range(rounds):
        for system, (step, _) in systems.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            took = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            times[system].append(took.item())
    medians = {system: 1e3 * statistics.median(its) for system, its in times.items()}
    return {"program": name, "size": size, "milliseconds": medians, "faults": faults}


System = tuple[Callable[[], Any], Callable[[], Tensor]]
"""A step, and the value of one."""


def _alone(name: str, size: int, mesh: Any) -> System:
    step, make = PROGRAMS[name]
    torch.manual_seed(1)
    model, field = make(), field_of(size)
    turn = (lambda: step(model, field)) if mesh.rank == 0 else (lambda: None)
    return turn, lambda: step(model, field)


def _weft(name: str, size: int, mesh: Any) -> System:
    step, make = PROGRAMS[name]
    torch.manual_seed(1)
    model = weft.distribute_module(make(), mesh)
    field: Any = weft.distribute_tensor(field_of(size), mesh, weft.P(None, None, "x"))
    turn = _turns(lambda field: step(model, field), field)
    def value() -> Tensor:
        out: Any = step(model, field)
        return out.full_tensor()

    return turn, value


def _turns(step: Callable[[Any], Any], field: Any) -> Callable[[], None]:
    """Each turn on a field of its own, as in a loop."""
    def turn() -> None:
        with torch.no_grad():
            fresh = field.clone()
        step(fresh)

    return turn


def _gathered(name: str, size: int, mesh: Any) -> System:
    """The field is gathered, every rank computes all of it and keeps its part."""
    step, make = PROGRAMS[name]
    torch.manual_seed(1)
    model = make()
    field = weft.distribute_tensor(field_of(size), mesh, weft.P(None, None, "x"))

    def turn() -> Tensor:
        full = step(model, field.full_tensor())
        first, last = field.sharding.box(mesh.rank)[2]
        return full[:, :, first:last].clone()

    return turn, lambda: step(model, field.full_tensor())


def _dtensor(name: str, size: int) -> System:
    step, make = PROGRAMS[name]
    torch.manual_seed(1)
    line = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = distribute_module(make(), line)
    columns = Shard(3) if name == "U-Net" else Shard(2)  # its convolutions cut the last dim alone
    field: Any = distribute_tensor(field_of(size), line, [columns])

    def value() -> Tensor:
        out: Any = step(model, field)
        return out.redistribute(line, [Replicate()]).to_local()

    return _turns(lambda field: step(model, field), field), value


if __name__ == "__main__":
    main()
