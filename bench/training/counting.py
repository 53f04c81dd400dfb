"""Bytes, collectives and memory of one step, on rank 0 of a world whose collectives return at once.

torch's "fake" backend moves nothing, so one process stands for any number of ranks, and every
system is counted alike: where it hands tensors to torch.distributed, as ATen sees it. DDP does not
accept what the fake backend returns; it runs with a hook of its own that reduces the same buckets.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from bench.training.models import Shape
from bench.training.systems import make
from weft.tensor.trace.trees import flatten
from weft.testing import peak_memory

__all__ = ["Collectives", "count"]

_SPACES = ("c10d", "_c10d_functional", "c10d_functional")

_FIRST = 3
"""Steps before the one that is counted."""


_NUMBERS_NBYTES = 64
"""Up to this many bytes a collective tells a loss or a count: it is not counted, its bytes are."""


class Collectives(TorchDispatchMode):
    """Bytes that this rank receives, and how many collectives there are."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace in _SPACES and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            nbytes = _received(func.namespace, name, args, out)
            self.nbytes += nbytes
            self.num += nbytes > _NUMBERS_NBYTES
        return out


def _received(space: str, name: str, args: Any, out: Any) -> int:
    """What a rank receives, of a ring."""
    if space == "c10d":
        return _of_group(name, args)
    size = _size(args[-1])
    match name:
        case "all_gather_into_tensor" | "all_gather_into_tensor_out":
            return out.nbytes - args[0].nbytes
        case "reduce_scatter_tensor" | "reduce_scatter_tensor_out":
            return args[0].nbytes - out.nbytes
        case "all_reduce" | "all_reduce_":
            return 2 * args[0].nbytes * (size - 1) // size
        case "all_to_all_single":
            return args[0].nbytes * (size - 1) // size
    raise AssertionError(f"{name} is not counted")


def _of_group(name: str, args: Any) -> int:
    match name:
        case "allreduce_":
            size = _boxed_size(args[1])
            return sum(2 * one.nbytes * (size - 1) // size for one in args[0])
        case "_allgather_base_" | "all_gather_single_":
            return args[0].nbytes - args[1].nbytes
        case "_reduce_scatter_base_" | "reduce_scatter_single_":
            return args[1].nbytes - args[0].nbytes
        case "alltoall_base_":
            size = _boxed_size(args[2])
            return args[0].nbytes * (size - 1) // size
        case "recv_":
            return sum(one.nbytes for one in args[0])
        case "send" | "barrier":
            return 0
    raise AssertionError(f"{name} is not counted")


def _size(group: Any) -> int:
    found = group if hasattr(group, "size") else dist.distributed_c10d._resolve_process_group(group)
    return found.size()


def _boxed_size(group: Any) -> int:
    return dist.ProcessGroup.unbox(group).size()


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
        return {"bytes": seen.nbytes, "collectives": seen.num, "memory": memory.peak}
    finally:
        dist.destroy_process_group()


def _local(x: Any) -> Any:
    return x._local_tensor if hasattr(x, "_local_tensor") else x
