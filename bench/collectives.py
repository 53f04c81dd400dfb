"""Bytes and collectives, counted where tensors are handed to torch.distributed, as ATen sees it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collectives"]

_SPACES = ("c10d", "_c10d_functional", "c10d_functional")

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
    group = _group(args[-1])
    size = group.size()
    match name:
        case "all_gather_into_tensor" | "all_gather_into_tensor_out":
            return out.nbytes - args[0].nbytes
        case "reduce_scatter_tensor" | "reduce_scatter_tensor_out":
            return args[0].nbytes - out.nbytes
        case "all_reduce" | "all_reduce_":
            return 2 * args[0].nbytes * (size - 1) // size
        case "all_to_all_single":
            return out.nbytes - args[1][group.rank()] * out.nbytes // max(1, out.shape[0])
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


def _group(group: Any) -> Any:
    return group if hasattr(group, "size") else dist.distributed_c10d._resolve_process_group(group)


def _boxed_size(group: Any) -> int:
    return dist.ProcessGroup.unbox(group).size()
