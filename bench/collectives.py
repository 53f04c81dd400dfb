"""Bytes and collectives, counted where tensors are handed to torch.distributed, as ATen sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collectives"]

_SPACES = ("c10d", "_c10d_functional", "c10d_functional")

_NUMBERS_NBYTES = 64
"""Up to this many bytes a collective tells a loss or a count: it is not one of `num`."""


class Collectives(TorchDispatchMode):
    """What this rank hands to torch.distributed. A collective that cannot be counted is refused.

    Attributes:
        received, sent: bytes; of reductions and gathers those of a ring. A broadcast is received.
        broadcast: bytes of broadcasts, on every rank.
        calls: how many collectives and messages there are.
        num: how many of them bring more than a few numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received = self.sent = self.broadcast = self.calls = self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace in _SPACES and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            by_group = func.namespace == "c10d"
            received, sent = _of_group(name, args) if by_group else _functional(name, args, out)
            self.received += received
            self.sent += sent
            self.broadcast += args[0][0].nbytes if name == "broadcast_" else 0
            self.calls += 1
            self.num += received > _NUMBERS_NBYTES
        return out


def _functional(name: str, args: Any, out: Any) -> tuple[int, int]:
    """Received and sent, by a functional collective, such as DTensor's."""
    group = args[-1]
    if not hasattr(group, "size"):
        group = dist.distributed_c10d._resolve_process_group(group)
    match name:
        case "all_gather_into_tensor" | "all_gather_into_tensor_out":
            moved = out.nbytes - args[0].nbytes
        case "reduce_scatter_tensor" | "reduce_scatter_tensor_out":
            moved = args[0].nbytes - out.nbytes
        case "all_reduce" | "all_reduce_":
            moved = _around(args[0], group)
        case "all_to_all_single":
            return _but_own(out, args[1], group), _but_own(args[0], args[2], group)
        case _:
            raise AssertionError(f"{name} is not counted")
    return moved, moved


def _of_group(name: str, args: Any) -> tuple[int, int]:
    """Likewise, by a method of a process group, such as weft's."""
    match name:
        case "allreduce_":
            moved = sum(_around(one, dist.ProcessGroup.unbox(args[1])) for one in args[0])
        case "_allgather_base_" | "all_gather_single_":
            moved = args[0].nbytes - args[1].nbytes
        case "_reduce_scatter_base_" | "reduce_scatter_single_":
            moved = args[1].nbytes - args[0].nbytes
        case "alltoall_base_" | "all_to_all_single_":
            out, x, group, recv, send = args[:5]
            group = dist.ProcessGroup.unbox(group)
            return _but_own(out, recv, group), _but_own(x, send, group)
        case "recv_":
            return sum(one.nbytes for one in args[0]), 0
        case "send":
            return 0, sum(one.nbytes for one in args[0])
        case "broadcast_":
            is_root = dist.ProcessGroup.unbox(args[1]).rank() == args[2]
            return (0 if is_root else args[0][0].nbytes), 0
        case "barrier":
            return 0, 0
        case _:
            raise AssertionError(f"{name} is not counted")
    return moved, moved


def _around(x: Tensor, group: Any) -> int:
    return 2 * x.nbytes * (group.size() - 1) // group.size()


def _but_own(x: Tensor, splits: Sequence[int], group: Any) -> int:
    """Bytes of an all-to-all, without those of a rank for itself."""
    own = splits[group.rank()] if splits else len(x) // group.size()
    return x.nbytes - own * x.nbytes // max(1, len(x))
