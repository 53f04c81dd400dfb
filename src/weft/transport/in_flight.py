"""Tensors whose data are still being received: the first use waits for them.

`in_flight` returns a tensor that has everything but its data: shape, dtype, a place in autograd's
graph. Its class is `InFlight`, so torch calls `__torch_function__` for every use of it. That
waits, gives the tensor its data, and makes it a plain tensor. From then on it costs nothing, and
other tensors never pay for it. (torch's AsyncCollectiveTensor waits in the
same way, but remains a wrapper afterwards.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from weft.comm import Finish
from weft.errors import UnsupportedOpError

__all__ = ["InFlight", "in_flight", "landed"]

_FINISH = "_weft_finish"

_KNOWN = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("requires_grad", "grad_fn", "is_leaf", "shape", "dtype", "device")
)
"""What can be asked before the data have arrived."""


class InFlight(torch.Tensor):
    """A tensor whose data are still being received."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _KNOWN:
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


def landed(tensor: Tensor) -> Tensor:
    """The tensor, plain and with its data."""
    if type(tensor) is InFlight:
        with torch.no_grad():
            data = getattr(tensor, _FINISH)()
            delattr(tensor, _FINISH)
            tensor.__class__ = torch.Tensor  # type: ignore[assignment]
            tensor.data = data
    return tensor
