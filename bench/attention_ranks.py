"""One of the ranks of `weft bench attention`: weft and what it is compared with, in turns.

Started as `weft run -n N attention_ranks.py ASKED`, ASKED as JSON; rank 0 writes one JSON object
per program. The time of a turn is that of its slowest rank. One process alone is rank 0, while the
others wait.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import weft
from bench.attention_programs import PROGRAMS, SYSTEMS, Program
from bench.faults import fault_of

__all__ = ["main", "measure"]

Attend = Callable[..., Any]


def main() -> None:
    """Measure what this process was asked for."""
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    mesh = weft.init_mesh({"x": int(os.environ["WORLD_SIZE"])})
    for name, program in PROGRAMS.items():
        times, fault = measure(program, asked["length"], asked["rounds"], mesh)
        if dist.get_rank() == 0:
            said = {"program": name, "milliseconds": times, "fault": fault}
            print(json.dumps(said), flush=True)
    dist.barrier()
    os._exit(0)  # as in `bench.redistribution.ranks`


def measure(
    program: Program, length: int, rounds: int, mesh: Any
) -> tuple[dict[str, float], str | None]:
    """Milliseconds per system, and why DTensor is not among them; results are compared first."""
    turns = _turns(program, length, mesh)
    due = turns["one process"]()
    for system in [one for one in SYSTEMS[1:] if one in turns]:
        found = turns[system]().full_tensor()
        if system == "zig-zag":
            found = weft.zigzag(length, mesh.size()).restore(found, 2)
        torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-4)
    dtensor = _dtensor(program, length)
    fault = fault_of(lambda: dtensor().full_tensor(), due)
    if fault is None:
        turns["DTensor"] = dtensor
    times: dict[str, list[float]] = {system: [] for system in turns}
    for _ in range(rounds):
        for system, turn in turns.items():
            dist.barrier()
            start = time.perf_counter()
            if system != "one process" or mesh.get_rank() == 0:
                turn()
            took = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            times[system].append(took.item())
    return {system: 1e3 * statistics.median(its) for system, its in times.items()}, fault


def _turns(program: Program, length: int, mesh: Any) -> dict[str, Callable[[], Any]]:
    """Per system a turn, forward and backward, which gives the result."""
    whole = program.operands(length)
    on_sequence = weft.P(None, None, "x")

    def sharded(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [weft.distribute_tensor(one, mesh, on_sequence) for one in tensors]

    def gathered(query: Tensor, key: Any, value: Any) -> Tensor:
        return program.attend(query, *[one.redistribute(placements=weft.P())
                                       for one in (key, value)])

    found: dict[str, Callable[[], Any]] = {
        "one process": _turn(program.attend, whole), "weft": _turn(program.attend, sharded(whole)),
    }
    if program.is_causal:
        order = weft.zigzag(length, mesh.size())
        found["zig-zag"] = _turn(order.attend, sharded([order.apply(one, 2) for one in whole]))
    found["keys gathered"] = _turn(gathered, sharded(whole))
    return found


def _dtensor(program: Program, length: int) -> Callable[[], Any]:
    """By torch's plain products: its DTensor has no gradient of fused attention on CPUs."""
    line = dist.init_device_mesh("cpu", (dist.get_world_size(),))

    def attend(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return program.attend(*tensors)

    return _turn(attend, [distribute_tensor(one, line, [Shard(2)])
                          for one in program.operands(length)])


def _turn(attend: Attend, tensors: Sequence[Tensor]) -> Callable[[], Any]:
    tensors = [one.detach().requires_grad_() for one in tensors]

    def turn() -> Any:
        for one in tensors:
            one.grad = None
        out = attend(*tensors)
        (out * out).sum().backward()
        return out.detach()

    return turn


if __name__ == "__main__":
    main()
