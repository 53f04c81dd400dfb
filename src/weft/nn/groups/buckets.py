"""Gradients of replicated parameters, summed in buckets while the backward goes on.

What the groups of a line have found waits until there is enough of it for one collective: small
groups are summed together, and what is left at the end of the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableAutocast  # type: ignore[attr-defined]

from weft.nn.groups.pack import Pack
from weft.tensor.leaf_gradients import accumulate

__all__ = ["Buckets"]

_NBYTES = 1 << 20
"""From this size on a bucket is under way. It is memory at the peak of a backward."""


class Buckets:
    """What waits to be summed, by mesh, axes and dtype."""

    def __init__(self) -> None:
        self._waiting: dict[Any, list[tuple[Pack, list[Tensor], Tensor]]] = {}

    def add(self, pack: Pack) -> None:
        """Take what has arrived of a pack's gradients."""
        found = pack.take()
        if found is not None:
            self._waiting.setdefault(pack.kind.key(), []).append((pack, *found))

    def start(self, all_of_them: bool) -> list[Callable[[], None]]:
        """Begin to sum the buckets that are large enough, or all; the functions wait for the sums,
        and accumulate them."""
        ready = [
            key for key, waiting in self._waiting.items()
            if all_of_them or sum(flat.nbytes for _, _, flat in waiting) >= _NBYTES
        ]
        return [_started(self._waiting.pop(key)) for key in ready]

    def drop(self) -> None:
        self._waiting.clear()


def _started(waiting: list[tuple[Pack, list[Tensor], Tensor]]) -> Callable[[], None]:
    first = waiting[0][0]
    locals_ = [local for _, mine, _ in waiting for local in mine]
    with torch.no_grad(), _DisableAutocast():
        flats = [flat for _, _, flat in waiting]
        flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        waiting.clear()
        comm = first.kind.mesh.comm(tuple(sorted(first.kind.rest)))
        nbytes = 2 * flat.nbytes * (comm.size - 1) // comm.size
        with first.told("AllReduce", "P(sum)->I", nbytes, first.kind.rest):
            finish = comm.start_all_reduce(flat, "sum", own=True)

    def land() -> None:
        parts = finish().split([local.numel() for local in locals_])
        for local, part in zip(locals_, parts):
            accumulate(local, part.view(local.shape), False)

    return land
