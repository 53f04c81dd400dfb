"""What is handed to the methods of process groups, in bytes, in either direction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["Bytes", "counted"]


@dataclass
class Bytes:
    """Of one rank."""

    sent: int = 0
    received: int = 0
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
