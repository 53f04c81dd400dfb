"""Memory of gathered parameters, which is freed after a use and filled again before the next.

A freed storage has no bytes, and a kernel that reads it ends the process. So a reader of such
memory fills it first (`filled`, `local_data`), and makes the gradient fill it again (`watch`). Code
that passes its address to something outside of autograd keeps it (`keep`). What shares it keeps
alive who can fill it (`hold`), and printing it says that it is freed (`text`).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, strided

from weft.tensor.meta import forget_recipes
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.trees import flatten, local_of
from weft.tensor.views.moved import unwrap_view
from weft.transport.in_flight import landed

__all__ = [
    "Freed", "fill", "filled", "hold", "is_used", "keep", "local_data", "memory_of", "register",
    "text", "watch",
]


class Freed(ABC):
    """One storage. `axes`: over which tensors in it are R, or would be with a gradient."""

    axes: frozenset[int]

    @abstractmethod
    def ask(self, gradients: Any) -> None:
        """A hook before a node of autograd's graph: fills the memory that the node reads."""

    @abstractmethod
    def fill(self) -> None:
        """Fill the memory: a collective, if its bytes are gone."""

    @abstractmethod
    def keep(self) -> None:
        """Free it no more: its address is known outside."""


_KNOWN: weakref.WeakValueDictionary[int, Freed] = weakref.WeakValueDictionary()
"""By storage, which the value keeps alive."""


class _Used:
    any = False


def is_used() -> bool:
    """Whether there has been such memory in this process; until then no call watches."""
    return _Used.any


def register(storage: Any, freed: Freed) -> None:
    if not _Used.any:
        _Used.any = True
        forget_recipes()  # those that watch nothing
    _KNOWN[storage._cdata] = freed


def memory_of(local: Tensor) -> Freed | None:
    """The `Freed` of a tensor's memory; None for memory that stays."""
    return _KNOWN.get(local.untyped_storage()._cdata) if _KNOWN else None


def fill(tensor: ShardTensor) -> None:
    """Fill the tensor's memory, before it is read."""
    filled((tensor._local,))


def local_data(tensor: Tensor) -> Tensor:
    """The local tensor, plain and with its data: they have landed, and their memory is filled."""
    local = unwrap_view(landed(local_of(tensor)))
    filled((local,))
    return local


def hold(local: Tensor) -> Tensor:
    """Let a tensor that shares such memory keep alive what fills it."""
    local._weft_memory = memory_of(local)  # type: ignore[attr-defined]
    return local


_PLAIN = (Tensor, torch.nn.Parameter)


def text(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> str:
    """torch's text of a plain tensor. One whose memory is freed is in no module's hands, but in the
    variables of a traceback: to print it is no collective."""
    if type(tensor) in _PLAIN and tensor.layout is strided and tensor.device.type != "meta" and (
        torch._C._has_storage(tensor) and not tensor.untyped_storage().nbytes() and tensor.numel()
    ):
        return f"tensor(freed, size={tuple(tensor.shape)}, dtype={tensor.dtype})"
    return original(tensor, *args, **kwargs)


def keep(tensor: ShardTensor) -> None:
    """Keep the tensor's memory: its address is passed on."""
    for memory in filled((tensor._local,)).values():
        memory.keep()


def filled(locals_: Sequence[Tensor]) -> dict[int, Freed]:
    """Fill the memory of these tensors before they are read; returns it."""
    found: dict[int, Freed] = {}
    if _KNOWN:
        for local in locals_:
            one = memory_of(unwrap_view(local))
            if one is not None and id(one) not in found:
                one.fill()
                found[id(one)] = one
    return found


def watch(out: Any, found: dict[int, Freed]) -> None:
    """Make the gradient of `out`, which was computed from these, fill their memory again."""
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
        else:
            hold(local)
            if not one._meta.varying:  # it is read again, by calls that have to be watched
                one._meta = one._meta.replace(varying=mine.axes)


def _node_of(local: Tensor) -> Any:
    """The node of the op that made it. That of a view is exchanged when the view is written to, and
    reads nothing."""
    base = local._base if local._is_view() else None
    return local.grad_fn if base is None or base.grad_fn is None else base.grad_fn
