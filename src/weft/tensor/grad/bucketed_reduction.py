"""Gradients that are reduced while the backward continues, with a limit on concurrent reductions.

Gradients of replicated leaves wait for the end of the backward (`tensor.leaf_gradients`). At a
barrier, those that have arrived by then are reduced as one, while the backward continues.
If too many reductions are in progress, the oldest is waited for first. The results are accumulated
at the end, with all others.

Theory of operation. A barrier is a hook on the gradient of a module's input. The engine runs first
what the forward recorded last, and a leaf as soon as all its uses are done. So when the hook runs,
the gradients have arrived of exactly those leaves whose uses all came after the input was made.
This holds on every rank, whatever its blocks, and all start the same reductions in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._C import _current_graph_task_id  # type: ignore[attr-defined]

from weft.tensor.backward import Use, running, taken
from weft.tensor.shard_tensor import ShardTensor
from weft.transport import start_together

__all__ = ["barrier"]


class _UnderWay:
    """A reduction of gradients in progress. `land` waits for it, once."""

    __slots__ = ("_finish", "_totals", "uses")

    def __init__(self, uses: Sequence[Use], finish: Callable[[], Sequence[Tensor]]) -> None:
        self.uses, self._finish = uses, finish
        self._totals: Sequence[Tensor] | None = None

    @property
    def is_outstanding(self) -> bool:
        return self._totals is None

    def land(self) -> Sequence[Tensor]:
        """The gradients, in the order of `uses`."""
        if self._totals is None:
            self._totals = [use.reduced(one) for use, one in zip(self.uses, self._finish())]
        return self._totals


def barrier(tensor: ShardTensor, max_outstanding: int) -> None:
    """Reduce the gradients that have arrived before that of this tensor, when its own arrives."""
    local: Any = tensor._local
    if local.requires_grad and not local.is_leaf:
        local.register_hook(lambda _: _reduce_arrived(max_outstanding))


def _reduce_arrived(max_outstanding: int) -> None:
    found = running().found.get(_current_graph_task_id())
    if found is None or found.creates_graph:
        return
    arrived, found.uses[:] = sorted(found.uses), []
    uses, grads = taken(arrived)
    if not uses:
        return
    outstanding = [one for one in found.early if one.is_outstanding]
    for one in outstanding[: len(outstanding) - max_outstanding + 1]:
        one.land()
    moves = [use.transition.reverse for use in uses]
    found.early.append(_UnderWay(uses, start_together(moves, grads, uses)))
