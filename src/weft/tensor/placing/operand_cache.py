"""The forms of a tensor that its uses needed, for later uses.

They are kept until the tensor changes or a backward has passed. All ranks run the same program, so
they forget at the same call.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from weft.core import Layout
from weft.tensor.leaf_gradients import LeafUse
from weft.tensor.placing.halos import Halo
from weft.tensor.shard_tensor import ShardTensor
from weft.transport.transition import Transition

__all__ = ["MAX_VIEWS", "OperandCache", "cache_of", "forget_form", "forget_views"]

MAX_VIEWS = 4096


class OperandCache(dict[Any, Any]):
    """The forms of a tensor that its uses needed.

    `leaf_uses` are leaves of their own, and survive a backward (see `tensor.leaf_gradients`).
    `was_reduced`, for a partial tensor: its local tensor and version when it was reduced, the
    reduced tensor (or its local tensor) and layout, and the scope (see `call.reduce_once`). `halo`:
    the reads of the tensor beyond its shards.
    """

    __slots__ = ("__weakref__", "halo", "leaf_uses", "was_reduced")

    def __init__(self) -> None:
        self.was_reduced: tuple[torch.Tensor, int, torch.Tensor, Layout, object] | None = None
        self.leaf_uses: dict[Transition, tuple[LeafUse, torch.Tensor]] = {}
        self.halo: Halo | None = None

    def clear(self) -> None:
        super().clear()
        self.was_reduced = self.halo = None

    def end_with_backward(self) -> None:
        """The next backward forgets it all."""
        live = _LIVE.views
        if len(live) > MAX_VIEWS:
            forget_views()
        live.append(weakref.ref(self))

    def keep(self, key: Any, form: Any) -> None:
        """Keep a form until a backward has passed."""
        if not self:
            self.end_with_backward()
        self[key] = form

    def leaf_use(
        self, transition: Transition, local: torch.Tensor
    ) -> tuple[LeafUse, torch.Tensor] | None:
        """The use of this leaf; None where there is none, or the leaf has other memory since."""
        found = self.leaf_uses.get(transition)
        if found is None:
            return None
        use, _ = found
        if use.operand is local and use.address == local.data_ptr():
            return found
        del self.leaf_uses[transition]  # only its graphs keep it alive
        return None

    def keep_leaf_use(self, transition: Transition, made: tuple[LeafUse, torch.Tensor]) -> None:
        """Keep it for the next step, in place of the one of an equal transition: after a cache was
        full or cleared, transitions are made anew, and old ones are never looked up."""
        for old in [one for one in self.leaf_uses if one.key == transition.key]:
            del self.leaf_uses[old]  # only its graphs keep it alive
        self.leaf_uses[transition] = made


def cache_of(tensor: ShardTensor) -> OperandCache:
    """That of a tensor; a new one, if it has none."""
    found = tensor._memo
    if found is None:
        found = tensor._memo = OperandCache()
    return found


def forget_form(of: weakref.ref[OperandCache], key: Any, gradients: Any) -> None:
    """Before the gradient of a moved operand moves back: the operand has been read for the last
    time, and what moves back needs the memory."""
    views = of()
    if views is not None:
        views.pop(key, None)


class _Live(threading.local):
    """The views of this thread that the next backward forgets; it keeps none alive."""

    def __init__(self) -> None:
        self.views: list[weakref.ref[OperandCache]] = []


_LIVE = _Live()


def forget_views() -> None:
    """Forget moved operands after a backward: the next forward starts anew, and nothing gathered
    stays alive."""
    for views in _LIVE.views:
        found = views()
        if found is not None:
            found.clear()
    _LIVE.views.clear()
