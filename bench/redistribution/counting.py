"""What is handed to torch.distributed, in bytes: counted where it is handed over.

weft goes through the methods of process groups, DTensor through torch's functional collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Bytes", "FunctionalBytes", "counted"]


@dataclass
class Bytes:
    """Of one rank. `self_sent` is what it hands over for itself."""

    sent: int = 0
    received: int = 0
    self_sent: int = 0
    broadcast: int = 0
    calls: int = 0


@contextmanager
def counted() -> Iterator[Bytes]:
    """Count until the end. A collective that cannot be counted exactly is refused."""
    seen = Bytes()

    def all_to_all(call: Any, group: Any, out: Tensor, x: Tensor, recv: Sequence[int],
                   send: Sequence[int], *rest: Any) -> Any:
        assert len(recv) == len(send) == group.size() and x.dim() == 1
        assert sum(recv) == out.numel() and sum(send) == x.numel()
        mine, width = group.rank(), x.element_size()
        assert recv[mine] == send[mine]
        seen.sent += (sum(send) - send[mine]) * width
        seen.received += (sum(recv) - recv[mine]) * width
        seen.self_sent += send[mine] * width
        return call(group, out, x, recv, send, *rest)

    def send(call: Any, group: Any, tensors: list[Tensor], to: int, tag: int) -> Any:
        assert to != group.rank()
        seen.sent += sum(tensor.nbytes for tensor in tensors)
        return call(group, tensors, to, tag)

    def recv(call: Any, group: Any, tensors: list[Tensor], by: int, tag: int) -> Any:
        assert by != group.rank()
        seen.received += sum(tensor.nbytes for tensor in tensors)
        return call(group, tensors, by, tag)

    def broadcast(call: Any, group: Any, tensors: list[Tensor], options: Any) -> Any:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        seen.broadcast += nbytes
        seen.received += 0 if options.rootRank == group.rank() else nbytes
        return call(group, tensors, options)

    def refuse(call: Any, *_: Any) -> Any:
        raise AssertionError(f"{call.__name__} is not counted")

    def all_gather(call: Any, group: Any, out: Tensor, x: Tensor, *rest: Any) -> Any:
        assert out.numel() == x.numel() * group.size()
        seen.sent += x.nbytes * (group.size() - 1)
        seen.received += out.nbytes - x.nbytes
        return call(group, out, x, *rest)

    counts = {"alltoall_base": all_to_all, "all_to_all_single": all_to_all, "send": send,
              "recv": recv, "broadcast": broadcast, "_allgather_base": all_gather,
              "all_gather_single": all_gather}
    others = ["allreduce", "alltoall", "allgather", "gather", "reduce_scatter",
              "_reduce_scatter_base", "reduce_scatter_single", "scatter", "reduce"]
    names = [*counts, *others]  # some of them in some versions of torch
    before = {name: vars(ProcessGroup)[name] for name in names if name in vars(ProcessGroup)}

    def watch(name: str) -> Any:
        call, count = getattr(ProcessGroup, name), counts.get(name, refuse)

        def method(group: Any, *args: Any) -> Any:
            seen.calls += 1
            return count(call, group, *args)

        return method

    for name in before:
        setattr(ProcessGroup, name, watch(name))
    try:
        yield seen
    finally:
        for name, call in before.items():
            setattr(ProcessGroup, name, call)


class FunctionalBytes(TorchDispatchMode):
    """Bytes received by torch's functional collectives, which DTensor uses."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace in ("_c10d_functional", "c10d_functional"):
            self._count(name, args, out)
        elif func.namespace == "c10d" and name in ("scatter_", "broadcast_"):
            raise AssertionError(f"{name} is not counted")
        return out

    def _count(self, name: str, args: Any, out: Any) -> None:
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            return
        if name == "all_gather_into_tensor":
            self.received += out.nbytes - args[0].nbytes
        elif name == "all_to_all_single":
            _, recv, _, group = args
            mine = dist.get_group_rank(dist_group(group), dist.get_rank())
            self.received += out.nbytes - recv[mine] * out.nbytes // max(1, out.shape[0])
        elif name == "reduce_scatter_tensor":
            self.received += args[0].nbytes - out.nbytes
        elif name == "all_reduce":
            size = args[2].size() if hasattr(args[2], "size") else dist_group(args[2]).size()
            self.received += 2 * out.nbytes * (size - 1) // size
        else:
            raise AssertionError(f"{name} is not counted")


def dist_group(name: Any) -> Any:
    """The process group of a functional collective."""
    return dist.distributed_c10d._resolve_process_group(name)
