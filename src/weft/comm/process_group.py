"""Collectives over torch.distributed: one code path for gloo, NCCL and other backends.

Data moves as bytes by `all_to_all_single` with split sizes, the one uneven primitive that every
backend has; by `broadcast`; and over gloo, for large amounts, by messages from rank to rank,
which need no common buffer. A table lists what a backend does as exactly and faster by itself.
Any other reduction is an exchange of partial values, torch's own reduction in mesh order, and a
gather, so that gloo gives bitwise the same as simulated ranks. (gloo's own MAX drops NaN, its bool
sum wraps, and its rings take longer than one exchange.)
"""

from __future__ import annotations

import inspect
import math
import pickle
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.communicator import (
    Finish,
    Pieces,
    Wait,
    as_bytes,
    nothing_to_wait_for,
)
from weft.comm.group_calls import GroupCalls, ProcessHome, backend_of
from weft.comm.point_to_point import Started
from weft.comm.reduction import reduce_partials
from weft.core import AxisName, balanced_cuts

__all__ = ["ProcessCommunicator"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
_OPS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
}
"""torch's reductions; the mean is the sum divided afterwards, as in the other implementations."""


def _options(options: Any, op: Any = None) -> Any:
    options.asyncOp = True
    if op is not None:
        options.reduceOp = op
    return options


_REDUCE = {kind: _options(dist.AllreduceOptions(), op) for kind, op in _OPS.items()}
_ALL_TO_ALL = _options(dist.AllToAllOptions())

_NATIVE = frozenset(
    [(kind, dtype) for kind in ("sum", "avg", "product") for dtype in _FLOATS]
    + [(kind, dtype) for kind in ("sum", "product", "max", "min") for dtype in _INTEGERS]
)
_EXACT: dict[str, frozenset[tuple[str, torch.dtype]]] = {"nccl": _NATIVE, "fake": _NATIVE}
"""What a backend itself reduces exactly. Max and min of floats may lose NaN: not here.

torch's "fake" backend, on which costs are measured without a network, takes NCCL's paths.
"""

_OF_TWO = frozenset([(kind, dtype) for kind in ("sum", "avg") for dtype in _FLOATS[2:]])
"""What gloo sums exactly where two ranks add, in whatever order."""

_GATHER_LIMIT_NBYTES = 1 << 20
"""Up to this many bytes gathered, one exchange of whole partial values beats scatter and gather."""

_SWAP_NBYTES = 1 << 15
"""From this many bytes per rank, gloo's messages cost less than copies into common buffers."""

_SWAP_PARTIALS = 16
"""Partial values use messages from this many times that: they are in one buffer already."""

_HEAD_NBYTES = 256
"""What `exchange` sends first: a length, and the pickle itself if it fits."""

_broadcast = inspect.unwrap(dist.broadcast)
_gather_even = inspect.unwrap(
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_scatter_even = inspect.unwrap(
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""torch's own functions, below its logger and below what weft intercepts in users' calls. torch
renamed the last two; the older names warn if the newer exist."""


class ProcessCommunicator(GroupCalls):
    """Collectives over one process group."""

    __slots__ = ("exact", "native", "sums")

    def __init__(
        self, world: ProcessHome, group: dist.ProcessGroup, ranks: tuple[int, ...],
        axes: tuple[AxisName, ...], device: torch.device,
    ) -> None:
        super().__init__(world, group, ranks, axes, device)
        backend = backend_of(group, device.type) or ""
        self.exact = _EXACT.get(backend, frozenset())
        self.sums = self.exact
        if backend == "gloo":
            self.swaps_from_nbytes = _SWAP_NBYTES
            self.sums = _OF_TWO if self.size == 2 else self.exact
        self.native = bool(self.exact) and self.in_order

    def _all_reduce(self, x: Tensor, kind: str, own: bool) -> Finish:
        if (kind, x.dtype) in self.sums:
            total = x if own else x.clone()
            # Directly to the group: a small gradient's reduction costs less than torch's wrappers.
            group = self._alive("all_reduce")
            wait = self._start("all_reduce", lambda x: group.allreduce([x], _REDUCE[kind]), total)
            return _then(wait, lambda: total.div_(self.size) if kind == "avg" else total)
        flat = x.reshape(-1)
        if x.numel() * x.element_size() * self.size <= _GATHER_LIMIT_NBYTES:
            partials = self._all_gather(flat, (flat.numel(),) * self.size)
            return lambda: reduce_partials(partials().chunk(self.size), kind).view(x.shape)
        cuts = balanced_cuts(flat.numel(), (self.size,))
        sizes = tuple(stop - start for start, stop in pairwise(cuts))
        out = torch.empty_like(flat)
        mine = self._reduce_scatter(flat, sizes, kind, out.split(sizes)[self.index])()
        gathered = self._all_gather(mine, sizes, out)
        return lambda: gathered().view(x.shape)

    def _all_gather(
        self, x: Tensor, sizes: tuple[int, ...], out: Tensor | None = None
    ) -> Finish:
        """By messages, where that is more than a little: received data is already in place. `x` may
        lie in its place in `out`."""
        if self.native and out is None and len(set(sizes)) == 1:
            data = as_bytes(x)
            whole = data.new_empty(data.numel() * self.size)
            group = self._alive("all_gather")
            wait = self._start("all_gather", _gather_even, whole, data, group, True)
            return _then(wait, lambda: whole.view(x.dtype))
        if sum(sizes) * x.element_size() < self.swaps_from_nbytes:
            return self._all_to_all(x.repeat(self.size), (x.numel(),) * self.size, sizes)
        out = x.new_empty(sum(sizes)) if out is None else out
        parts = out.split(sizes)
        recv = [(place, parts[place]) for place in self._others() if sizes[place]]
        send = [(place, x) for place in self._others() if x.numel()]
        wait = self._swap(send, recv, x.dtype)
        if parts[self.index].data_ptr() != x.data_ptr():
            parts[self.index].copy_(x)
        return _then(wait, lambda: out)

    def _others(self) -> list[int]:
        """The other positions, the next one first: every rank starts with a different one."""
        return [(self.index + step) % self.size for step in range(1, self.size)]

    def _reduce_scatter(
        self, x: Tensor, sizes: tuple[int, ...], kind: str, out: Tensor | None = None
    ) -> Finish:
        mine = sizes[self.index]
        if self.native and len(set(sizes)) == 1 and (kind, x.dtype) in self.exact:
            total = x.new_empty(mine)
            group = self._alive("reduce_scatter")
            wait = self._start("reduce_scatter", _scatter_even, total, x, _OPS[kind], group, True)
            return _then(wait, lambda: total.div_(self.size) if kind == "avg" else total)
        if sum(sizes) * x.element_size() < _SWAP_PARTIALS * self.swaps_from_nbytes:
            received = self._all_to_all(x, sizes, (mine,) * self.size)
            return lambda: reduce_partials(received().view(self.size, mine).unbind(), kind, out)
        parts = x.split(sizes)
        partials = list(x.new_empty(self.size - 1, mine))
        partials.insert(self.index, parts[self.index])
        recv = [(place, partials[place]) for place in self._others() if mine]
        send = [(place, parts[place]) for place in self._others() if sizes[place]]
        wait = self._swap(send, recv, x.dtype)
        return _then(wait, lambda: reduce_partials(partials, kind, out))

    def _all_to_all(self, x: Tensor, send: tuple[int, ...], recv: tuple[int, ...]) -> Finish:
        arriving = recv
        if not self.in_order:
            x = torch.cat(self._listed(x.split(send)))
            send, arriving = self._listed(send), self._listed(recv)
        data, width = as_bytes(x), x.element_size()
        out = data.new_empty(sum(recv) * width)
        call = self._alive("all_to_all").alltoall_base  # torch's wrapper around it takes 10 us
        sizes = [size * width for size in arriving], [size * width for size in send]
        wait = self._start("all_to_all", call, out, data, *sizes, _ALL_TO_ALL)

        def finish() -> Tensor:
            wait()
            received = out.view(x.dtype)
            if self.in_order:
                return received
            pieces = received.split(arriving)
            return torch.cat([pieces[place] for place in self.places])

        return finish

    def _swap(self, send: Pieces, recv: Pieces, dtype: torch.dtype) -> Wait:
        if self.swaps_from_nbytes == math.inf:
            return super()._swap(send, recv, dtype)  # such backends prefer few large messages
        if not send and not recv:
            return nothing_to_wait_for
        group = self._alive("all_to_all")

        def start() -> Started:
            started = Started(group, self.places, send, recv)
            self.world.under_way.add(started)
            return started

        return self._start("all_to_all", start)

    def _broadcast(self, x: Tensor, source: int) -> Tensor:
        data = as_bytes(x)
        data = data.clone() if source == self.index else torch.empty_like(data)
        group, place = self._alive("broadcast"), self.places[source]
        self._start("broadcast", _broadcast, data, None, group, True, place)()
        return data.view(x.dtype).view(x.shape)

    def _exchange(self, value: object) -> list[object]:
        data = pickle.dumps(value)
        head = len(data).to_bytes(8, "little")
        head += data if len(data) <= _HEAD_NBYTES - 8 else b""
        heads = self._gather_bytes(head.ljust(_HEAD_NBYTES, b"\0"), (_HEAD_NBYTES,) * self.size)
        lengths = tuple(int.from_bytes(head[:8], "little") for head in heads)
        if max(lengths) <= _HEAD_NBYTES - 8:
            return [pickle.loads(head[8 : 8 + n]) for head, n in zip(heads, lengths)]
        return [pickle.loads(one) for one in self._gather_bytes(data, lengths)]

    def _gather_bytes(self, data: bytes, sizes: tuple[int, ...]) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        parts = self._all_gather(mine, sizes)().cpu().split(sizes)
        return [part.numpy().tobytes() for part in parts]


def _then(wait: Wait, result: Finish) -> Finish:
    def finish() -> Tensor:
        wait()
        return result()

    return finish
