"""Memory that is freed after its use and filled again before the next: of gathered parameters.

A freed storage has no bytes, and a kernel that reads it ends the process. So whatever reads
such memory fills it (`filled`), and has it asked for before the gradient is computed (`watch`); and
whoever hands it out to code that autograd does not know of keeps it (`keep`).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weft.tensor.meta import forget_recipes
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.trees import flatten
from weft.tensor.views.moved import unwrap_view

__all__ = ["Freed", "fill", "filled", "is_used", "keep", "memory_of", "register", "watch"]


class Freed(ABC):
    """One storage. `axes`: over which tensors in it are R, or would be with a gradient."""

    axes: frozenset[int]

    @abstractmethod
    def ask(self, gradients: Any) -> None:
        """A hook before a node of autograd's graph: what it reads has to be there."""

    @abstractmethod
    def fill(self) -> None:
        """The bytes are there when it returns: a collective, where they are not."""

    @abstractmethod
    def keep(self) -> None:
        """Free it no more: its address is known outside."""


_KNOWN: weakref.WeakValueDictionary[int, Freed] = weakref.WeakValueDictionary()
"""By storage, which the value keeps alive."""


class _Used:
    any = False


def is_used() -> bool:
    """Whether there has been such memory in this process: until then nothing is to be watched."""
    return _Used.any


def register(storage: Any, freed: Freed) -> None:
    """Say what a storage is; `freed` holds the storage."""
    if not _Used.any:
        _Used.any = True
        forget_recipes()  # those that watch nothing
    _KNOWN[storage._cdata] = freed


def memory_of(local: Tensor) -> Freed | None:
    """What a tensor lies in; None for memory that stays."""
    return _KNOWN.get(local.untyped_storage()._cdata) if _KNOWN else None


def fill(tensor: ShardTensor) -> None:
    """The tensor is about to be read."""
    found = memory_of(unwrap_view(tensor._local)) if _KNOWN else None
    if found is not None:
        found.fill()


def keep(tensor: ShardTensor) -> None:
    """The tensor's address is handed out."""
    found = memory_of(unwrap_view(tensor._local)) if _KNOWN else None
    if found is not None:
        found.fill()
        found.keep()


def filled(locals_: Sequence[Tensor]) -> dict[int, Freed]:
    """The memories that these lie in, which are about to be read."""
    found: dict[int, Freed] = {}
    if _KNOWN:
        for local in locals_:
            one = memory_of(unwrap_view(local))
            if one is not None and id(one) not in found:
                one.fill()
                found[id(one)] = one
    return found


def watch(out: Any, found: dict[int, Freed]) -> None:
    """Have the gradient of `out`, which was computed of these, ask for them."""
    if not found:
        return
    for one in [out] if isinstance(out, Tensor) else flatten(out):
        local = unwrap_view(one._local) if type(one) is ShardTensor else one
        mine = memory_of(local)
        if mine is None:
            node = _node_of(local)
            if node is not None:
                for memory in found.values():
                    node.register_prehook(memory.ask)
        elif type(one) is not ShardTensor or (local.requires_grad and not one._meta.varying):
            mine.keep()
        elif not one._meta.varying:  # it is read again, by calls that have to be watched
            one._meta = one._meta.replace(varying=mine.axes)


def _node_of(local: Tensor) -> Any:
    """The node of the op that made it. That of a view is exchanged when the view is written to, and
    reads nothing."""
    base = local._base if local._is_view() else None
    return local.grad_fn if base is None or base.grad_fn is None else base.grad_fn
