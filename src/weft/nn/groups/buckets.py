"""Gradients of replicated parameters, summed in buckets while the backward goes on.

Gradients of several groups wait until there are enough of them for one collective. The rest is
summed at the end of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from weft.comm import joined, parts
from weft.nn.groups.member import Member
from weft.nn.groups.pack import Pack
from weft.tensor.backward import arrive

__all__ = ["Buckets"]

_NBYTES = 1 << 20
"""From this size on a bucket is under way. It is memory at the peak of a backward."""


_Found = tuple[Pack, list[Member], list[Tensor]]
"""Parameters of one pack, and their gradients."""


class Buckets:
    """Gradients that wait to be summed, by mesh, axes and dtype."""

    def __init__(self) -> None:
        self._waiting: dict[Any, list[_Found]] = {}

    def add(self, pack: Pack) -> None:
        """Take the gradients of a pack that have arrived."""
        members, grads = pack.taken()
        if grads:
            self._waiting.setdefault(pack.kind.key(), []).append((pack, members, grads))

    def start(self, all_of_them: bool) -> list[Callable[[], None]]:
        """Begin to sum the buckets that are large enough, or all; the functions wait for the sums,
        and accumulate them."""
        ready = [
            key for key, waiting in self._waiting.items()
            if all_of_them or _nbytes(waiting) >= _NBYTES
        ]
        return [_started(self._waiting.pop(key)) for key in ready]

    def drop(self) -> None:
        self._waiting.clear()


def _nbytes(waiting: Sequence[_Found]) -> int:
    return sum(grad.nbytes for _, _, grads in waiting for grad in grads)


def _started(waiting: list[_Found]) -> Callable[[], None]:
    first = waiting[0][0]
    kind = first.kind
    locals_ = [member.local for _, members, _ in waiting for member in members]
    flat = joined([grad.to(kind.reduce_dtype) for _, _, grads in waiting for grad in grads])
    waiting.clear()
    comm = kind.mesh.comm(tuple(sorted(kind.rest)))
    nbytes = 2 * flat.nbytes * (comm.size - 1) // comm.size
    with first.told("AllReduce", "P(sum)->I", nbytes, kind.rest):
        finish = comm.start_all_reduce(flat, "sum", own=True)

    def land() -> None:
        for local, part in zip(locals_, parts(finish().to(kind.dtype), locals_)):
            arrive(local, part)

    return land
