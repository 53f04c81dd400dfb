"""Bytes, collectives and memory of one step, on rank 0 of a world whose collectives return at once.

torch's "fake" backend moves nothing, so one process stands for any number of ranks, and every
system is counted alike. DDP does not accept what the fake backend returns; it runs with a hook of
its own that reduces the same buckets.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.collectives import Collectives
from bench.training.models import Shape
from bench.training.systems import make
from weft.tensor.trace.trees import flatten
from weft.testing import peak_memory

__all__ = ["count"]

_FIRST = 3
"""Steps before the one that is counted."""


class _PeakMemory(peak_memory):
    """Sees what is inside of DTensors, too, whose ops run below a mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        inside = [
            one._local_tensor for one in flatten((args, kwargs or {}, out))
            if isinstance(one, DTensor)
        ]
        self._meter.see(inside)
        return out


def count(system: str, way: str, model: str, num_ranks: int, shape: Shape) -> dict[str, int]:
    """Of one step: bytes received, collectives, and the peak of memory with what persists.

    Raises:
        KeyError: the system has no such way, or not for this model.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        made = make(system, way, model, shape)
        for _ in range(_FIRST):
            made.step()
        with Collectives() as seen:
            made.step()
        held = [_local(one) for one in made.model.parameters()]
        state = [_local(one) for its in made.optimizer.state.values() for one in its.values()]
        with _PeakMemory(held, state, _local(made.given)) as memory:
            made.step()
        return {"bytes": seen.received, "collectives": seen.num, "memory": memory.peak}
    finally:
        dist.destroy_process_group()


def _local(x: Any) -> Any:
    return x._local_tensor if hasattr(x, "_local_tensor") else x
