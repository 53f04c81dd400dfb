"""The interface of all collectives: one group of ranks in a fixed order.

`Communicator` makes the checks that every implementation needs and handles what needs no
communication (nothing to move; a group of one rank, in any world, which needs no more than this).
An implementation provides the underscored methods for at least two ranks. There are three: process
groups, simulated, recording.

Buffers are plain tensors. All except those of `all_reduce`, `broadcast` and `swap` are flat and
contiguous, and sizes count elements. A result never shares memory with an argument. Collectives are
finished (or, on an accelerator, ordered on its stream) when they return. A `swap`, or a collective
that is only started, is finished when the returned function has been called; if it never is, no
other rank waits for that.

In debug mode each collective, including empty ones, begins by comparing the requests of the ranks
(`_agree`); otherwise this costs one truth test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.comm.collective_call import CollectiveCall, Switch
from weft.comm.reduction import check_kind
from weft.core import AxisName

__all__ = [
    "Communicator", "Finish", "Home", "Pieces", "Wait", "as_bytes", "joined", "nothing_to_wait_for",
    "parts",
]

Pieces = Sequence[tuple[int, Tensor]]
"""Contiguous nonempty tensors, each with the position in the group that it goes to or comes
from: at most one per position, none for this rank's own."""

Wait = Callable[[], None]
Finish = Callable[[], Tensor]


_native: Any = torch._C._nn  # type: ignore[attr-defined]
_Exclude: Any = torch._C._ExcludeDispatchKeyGuard
_AUTOGRAD: Any = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
_AUTOGRAD |= torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_TOGETHER_NBYTES = 1 << 18
"""Up to this size, copying into one buffer costs less than another collective's latency."""


class Home(Protocol):
    """The world of a group, as its communicators see it."""

    rank: int
    debug: Switch

    def agree(self, ask: CollectiveCall) -> None:
        """Raise on all ranks if their requests differ."""


class Communicator:
    """Collectives over one group of ranks of a world.

    `ranks` are the members in mesh order; `index` is this rank's position among them. `axes` are
    the mesh axes that the group runs over, for messages and traffic. Buffers that no argument gives
    live on `device`. `debug` is the switch of the debug mode. If a rank receives at least
    `swaps_from_nbytes`, pieces are faster by `swap` than in one buffer.
    """

    __slots__ = ("axes", "debug", "device", "index", "ranks", "size", "swaps_from_nbytes", "world")

    def __init__(
        self, world: Home, ranks: tuple[int, ...], axes: tuple[AxisName, ...],
        device: torch.device,
    ) -> None:
        self.world, self.ranks, self.axes, self.device = world, ranks, axes, device
        self.index, self.size, self.debug = ranks.index(world.rank), len(ranks), world.debug
        self.swaps_from_nbytes: float = math.inf

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.where})"

    @property
    def where(self) -> str:
        """The group in words, for messages."""
        axes = ", ".join(map(str, self.axes))
        shown = ", ".join(map(str, self.ranks[:16])) + (", ..." if self.size > 16 else "")
        return f"axes ({axes}), ranks {shown}"

    def all_reduce(self, x: Tensor, kind: str, own: bool = False) -> Tensor:
        """The reduction of every rank's `x` (any shape, the same on all ranks), on all of them.

        `own`: no other code uses the buffer, and it may be written to.

        Raises:
            PlacementError: a kind that the dtype cannot carry exactly.
        """
        return self.start_all_reduce(x, kind, own)()

    def all_reduce_together(self, xs: list[Tensor], kind: str) -> Sequence[Tensor]:
        """`all_reduce` of several tensors, small ones of one dtype by one collective.

        Where there are several collectives the list gets the results, one after the other, so that
        what has been reduced is freed.

        Raises:
            PlacementError: a kind that a dtype cannot carry exactly.
        """
        nbytes, dtype = 0, xs[0].dtype
        for x in xs:
            nbytes += x.nbytes if x.dtype is dtype else _TOGETHER_NBYTES
        if len(xs) == 1:
            return [self.all_reduce(xs[0], kind)]
        if nbytes > _TOGETHER_NBYTES:
            for bucket in _buckets(xs):
                totals = self.all_reduce_together([xs[place] for place in bucket], kind)
                for place, total in zip(bucket, totals):
                    xs[place] = total
            return xs
        return parts(self.all_reduce(joined(xs), kind, own=True), xs)

    def start_all_reduce(self, x: Tensor, kind: str, own: bool = False) -> Finish:
        """An `all_reduce` that is only started; `x` must not change until the result is called."""
        if self.debug.on:
            self._agree("all_reduce", kind, x.dtype, tuple(x.shape))
        check_kind(kind, x.dtype)
        x = x.detach()
        if self.size == 1 or x.numel() == 0:
            return _finish(_copy(x))
        dense = x.contiguous()
        return _finish(self._all_reduce(dense, kind, own or dense is not x))

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """`sizes[i]` elements from each rank i, in rank order."""
        return self.start_all_gather(x, sizes)()

    def start_all_gather(self, x: Tensor, sizes: Sequence[int]) -> Finish:
        """An `all_gather` that is only started; `x` must not change until the result is called."""
        self._check(x, sizes[self.index], sizes)
        if self.debug.on:
            self._agree("all_gather", x.dtype, tuple(sizes))
        if self.size == 1 or sum(sizes) == 0:
            return _finish(_copy(x.detach()))
        return _finish(self._all_gather(x.detach(), tuple(sizes)))

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], kind: str) -> Tensor:
        """Reduce every rank's `x` of `sum(sizes)` elements; rank i keeps its `sizes[i]`.

        Raises:
            PlacementError: a kind that the dtype cannot carry exactly.
        """
        return self.start_reduce_scatter(x, sizes, kind)()

    def start_reduce_scatter(self, x: Tensor, sizes: Sequence[int], kind: str) -> Finish:
        """A `reduce_scatter` that is only started; `x` must not change until the result is called.
        """
        if self.debug.on:
            self._agree("reduce_scatter", kind, x.dtype, tuple(sizes))
        check_kind(kind, x.dtype)
        self._check(x, sum(sizes), sizes)
        if self.size == 1 or x.numel() == 0:
            return _finish(_copy(x.detach()))
        return _finish(self._reduce_scatter(x.detach(), tuple(sizes), kind))

    def all_to_all(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """Send `send[i]` elements to each rank i, receive `recv[i]` from it, in rank order."""
        self._check(x, sum(send), send)
        self._check(None, 0, recv)
        if self.debug.on:
            self._agree("all_to_all", x.dtype, send=tuple(send), recv=tuple(recv))
        if self.size == 1:
            return _copy(x.detach())
        return _finish(self._all_to_all(x.detach(), tuple(send), tuple(recv)))()

    def swap(self, send: Pieces, recv: Pieces, dtype: torch.dtype) -> Wait:
        """Start to send tensors, and to receive into others, each directly from and to memory.

        All ranks of the group call it, each with what the others have for it. The returned function
        waits. Until it has been called, what is sent must not change and what is received must not
        be read.
        """
        if self.debug.on:
            self._agree("all_to_all", dtype, send=self._sizes(send), recv=self._sizes(recv))
        if self.size == 1:
            return nothing_to_wait_for
        return self._swap(
            [(to, x.detach() if x.requires_grad else x) for to, x in send], recv, dtype
        )

    def _sizes(self, pieces: Pieces) -> tuple[int, ...]:
        sizes = {place: piece.numel() for place, piece in pieces}
        return tuple(sizes.get(place, 0) for place in range(self.size))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The tensor of the rank at position `source`; all pass one of its shape and dtype."""
        if self.debug.on:
            self._agree("broadcast", x.dtype, tuple(x.shape), source)
        x = x.detach()
        if self.size == 1 or x.numel() == 0:
            return _copy(x)
        return self._broadcast(x.contiguous(), source)

    def scatter(
        self, x: Tensor | None, sizes: Sequence[int], source: int, dtype: torch.dtype
    ) -> Tensor:
        """The rank at position `source` sends rank i `sizes[i]` elements; the others pass None."""
        send: Sequence[int] = (0,) * self.size
        recv = [0] * self.size
        recv[source] = sizes[self.index]
        if x is not None and self.index == source:
            send = sizes
        else:
            x = torch.empty(0, dtype=dtype, device=self.device)
        return self.all_to_all(x, send, recv)

    def exchange(self, value: object) -> list[object]:
        """A small picklable value of every rank, in group order."""
        if self.debug.on:
            self._agree("exchange")
        return [value] if self.size == 1 else self._exchange(value)

    def _agree(
        self, op: str, *facts: Hashable, send: tuple[int, ...] = (), recv: tuple[int, ...] = ()
    ) -> None:
        """Compare the requests of the ranks of the group before they are carried out; all of them
        raise CommunicationError if they differ."""
        if self.size > 1:
            self.world.agree(
                CollectiveCall(op, self.axes, self.ranks, facts, send=send, recv=recv))

    def _check(self, x: Tensor | None, numel: int, sizes: Sequence[int]) -> None:
        assert len(sizes) == self.size, f"{len(sizes)} sizes for {self.size} ranks"
        if x is not None:
            assert x.dim() == 1 and x.is_contiguous(), "buffers are flat and contiguous"
            assert x.numel() == numel, f"{x.numel()} elements where {numel} are due"

    # An implementation starts the first four, or else carries them out. The last argument of an
    # all-reduce says whether it may write to the buffer.

    _all_reduce: Callable[[Tensor, str, bool], Tensor | Finish]
    _all_gather: Callable[[Tensor, tuple[int, ...]], Tensor | Finish]
    _reduce_scatter: Callable[[Tensor, tuple[int, ...], str], Tensor | Finish]
    _all_to_all: Callable[[Tensor, tuple[int, ...], tuple[int, ...]], Tensor | Finish]
    _broadcast: Callable[[Tensor, int], Tensor]
    _exchange: Callable[[object], list[object]]

    def _swap(self, send: Pieces, recv: Pieces, dtype: torch.dtype) -> Wait:
        """By one all-to-all; overridden where there is a better way."""
        given = [piece.reshape(-1) for _, piece in sorted(send, key=itemgetter(0))]
        x = torch.cat(given) if given else torch.empty(0, dtype=dtype, device=self.device)
        finish = _finish(self._all_to_all(x, self._sizes(send), self._sizes(recv)))

        def wait() -> None:
            got, pieces = finish(), sorted(recv, key=itemgetter(0))
            for (_, piece), part in zip(pieces, got.split([piece.numel() for _, piece in pieces])):
                piece.copy_(part.view(piece.shape))

        return wait


def _buckets(xs: Sequence[Tensor]) -> list[list[int]]:
    """Indices into `xs` that go together: of one dtype, small, and small in total."""
    buckets: list[list[int]] = []
    last: dict[torch.dtype, list[int]] = {}
    room: dict[torch.dtype, int] = {}
    for place, x in enumerate(xs):
        if x.nbytes > _TOGETHER_NBYTES:
            buckets.append([place])
            continue
        if x.nbytes > room.get(x.dtype, -1):
            last[x.dtype], room[x.dtype] = [], _TOGETHER_NBYTES
            buckets.append(last[x.dtype])
        last[x.dtype].append(place)
        room[x.dtype] -= x.nbytes
    return buckets


def joined(xs: Sequence[Tensor]) -> Tensor:
    """Tensors of one dtype in one new buffer.

    By torch's functions for gradient buckets: a third of the time of cat, split and view, and half
    of that below autograd, where slices of the buffer are no views of it.
    """
    with _Exclude(_AUTOGRAD):
        return _native.flatten_dense_tensors(xs)


def parts(buffer: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """The slices of a buffer of `joined`, in the shapes of the tensors in `like`."""
    with _Exclude(_AUTOGRAD):
        return _native.unflatten_dense_tensors(buffer, like)


def nothing_to_wait_for() -> None:
    """The `Wait` of something that has already happened."""


def _finish(out: Tensor | Finish) -> Finish:
    return (lambda: out) if isinstance(out, Tensor) else out


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as flat bytes, by which data of every dtype moves, also float8 and bool.
    """
    flat = x.resolve_conj().resolve_neg().reshape(-1)
    if flat.numel() <= 1:  # contiguous with any stride, but only stride 1 can be viewed as bytes
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
