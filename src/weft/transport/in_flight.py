"""Tensors whose data are still being received, or are yet to be made: the first use waits for them.

`in_flight` returns a tensor that has everything but its data: shape, dtype, a place in autograd's
graph. Its class is `InFlight`, so torch calls `__torch_function__` for every use of it. That
waits, gives the tensor its data, and makes it a plain tensor. From then on it costs nothing, and
other tensors never pay for it. (torch's AsyncCollectiveTensor waits in the
same way, but remains a wrapper afterwards.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from weft.comm import Finish
from weft.errors import UnsupportedOpError

if TYPE_CHECKING:
    from weft.transport.transition import Transition

__all__ = ["InFlight", "in_flight", "landed", "late", "moved_early"]

_FINISH, _PART = "_weft_finish", "_weft_part"

_KNOWN = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("requires_grad", "grad_fn", "is_leaf", "shape", "dtype", "device")
)
"""What can be asked before the data have arrived."""

_is_contiguous = torch.Tensor.is_contiguous


class InFlight(torch.Tensor):
    """A tensor whose data are still being received."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN or (func is _is_contiguous and hasattr(args[0], _PART)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        for one in tree_leaves((args, kwargs)):
            landed(one)
        return func(*args, **(kwargs or {}))


def in_flight(out: Tensor, x: Tensor, finish: Finish) -> Tensor:
    """`out`, made from `x`; `finish` provides its data, and until then `x` must not change."""
    version = None if x.is_inference() else x._version

    def checked() -> Tensor:
        if version is not None and x._version != version:
            raise UnsupportedOpError(
                "redistribute(async_op=True)", f"its source of shape {tuple(x.shape)} was "
                f"written to {x._version - version} times before the result was used",
                "the source is still being sent: it must not change until the first use of "
                "the result", [f"version {version}, now {x._version}"],
                "x.clone().redistribute(..., async_op=True), or use the result first")
        return finish()

    setattr(out, _FINISH, checked)
    out.__class__ = InFlight  # type: ignore[assignment]
    return out


def late(out: Tensor, make: Finish, part: Callable[[Transition], Tensor | None]) -> Tensor:
    """`out`, whose data `make` gives at the first use; but what a transition makes of it, `part`
    gives by itself, with a graph of its own, or None where it cannot."""
    setattr(out, _FINISH, make)
    setattr(out, _PART, part)
    out.__class__ = InFlight  # type: ignore[assignment]
    return out


def moved_early(tensor: Tensor, move: Transition) -> Tensor | None:
    """What a transition makes of a tensor that is not there yet, where it can be made alone."""
    part = getattr(tensor, _PART, None) if type(tensor) is InFlight else None
    return None if part is None else part(move)


def landed(tensor: Tensor) -> Tensor:
    """The tensor, plain and with its data."""
    if type(tensor) is InFlight:
        with torch.no_grad():
            data = getattr(tensor, _FINISH)()
            delattr(tensor, _FINISH)
            if hasattr(tensor, _PART):
                delattr(tensor, _PART)
            tensor.__class__ = torch.Tensor  # type: ignore[assignment]
            tensor.data = data
    return tensor
