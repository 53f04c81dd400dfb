"""Gradients that stay partial over several backwards, until they are reduced on request."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from weft.core.scopes import setting

__all__ = ["Holding", "current", "holding"]


class Holding:
    """Gradients that are held.

    Args:
        leaves: those whose gradients stay partial.

    `leaves` are kept by id. `uses`: the gradients that have arrived, by stand-in (casts of one leaf
    together): the number, the `LeafUse`, and the holder of the gradient. `others`: holders of
    gradients that have arrived elsewhere, with their numbers.
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
    """The `Holding` in which backwards that begin now leave gradients."""
    return _thread.holding


def holding(held: Holding) -> AbstractContextManager[None]:
    """Backwards that begin inside leave gradients partial."""
    return setting(_thread, holding=held)
