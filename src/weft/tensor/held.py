"""Gradients that stay partial over several backwards, until somebody has them reduced."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from weft.core.scopes import setting

__all__ = ["Holding", "current", "holding"]


class Holding:
    """What is held.

    Args:
        leaves: those whose gradients stay partial.

    `leaves` are kept by id. `uses`: what has arrived of them, by what stands for it (casts of
    one leaf together): its number, the `LeafUse`, and what has the gradient. `others`: who holds
    what has arrived elsewhere, and its number.
    """

    __slots__ = ("leaves", "others", "uses")

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self.leaves = frozenset(map(id, leaves))
        self.uses: dict[Any, tuple[int, Any, Any]] = {}
        self.others: dict[Any, int] = {}

    def drop(self) -> None:
        """Forget all of it."""
        for _, _, seen in self.uses.values():
            seen.grad = None
        for other in self.others:
            other.drop()


class _Thread(threading.local):
    holding: Holding | None = None


_thread = _Thread()


def current() -> Holding | None:
    """Where backwards that begin now leave gradients."""
    return _thread.holding


def holding(held: Holding) -> AbstractContextManager[None]:
    """Backwards that begin inside leave gradients partial."""
    return setting(_thread, holding=held)
