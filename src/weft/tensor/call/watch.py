"""In debug mode each call first compares the replicas among its operands (`placing/replicas`).

While a debug block is open, `ShardTensor.__torch_function__` is taken over; while none is, a call
pays nothing for it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from weft.comm import this_world
from weft.tensor import members, operators, shard_tensor
from weft.tensor.call.dispatch import SPECIAL
from weft.tensor.modes import DEBUG, is_inside_region, num_dispatch_modes
from weft.tensor.placing import replicas
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.takeover import give_back, take_over, twin_of
from weft.tensor.trace.calls import written_by
from weft.tensor.trace.trees import flatten

__all__ = ["install"]

_Tensor = torch.Tensor
_METHODS = frozenset(one.__name__ for one in (members, operators, shard_tensor))
_OURS = __name__.split(".")[0] + "."


def install() -> None:
    """Follow debug mode from now on. Once per process."""
    function: Any = ShardTensor.__torch_function__.__func__  # type: ignore[attr-defined]
    original = twin_of(function)
    over = False

    def watched(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SPECIAL and this_world().debug.on and not (
            num_dispatch_modes() or is_inside_region() or _is_ours(sys._getframe(1))
        ):
            _compare(func, args, kwargs or {})
        return original(cls, func, types, args, kwargs)

    def follow() -> None:
        nonlocal over
        if DEBUG.on and not over:
            take_over(function, watched)
        elif over and not DEBUG.on:
            give_back(function, original)
        over = DEBUG.on > 0

    DEBUG.changed = follow
    follow()


def _is_ours(frame: FrameType | None) -> bool:
    """Whether weft makes the call: of its own steps no operand is the user's. Methods of the class
    do it for the one who calls them."""
    while frame is not None and frame.f_globals.get("__name__") in _METHODS:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS)


def _compare(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """What is written to (an in-place op's first operand, `out=`) need not be alike before."""
    name = getattr(func, "__name__", str(func))
    written = {id(one) for one in written_by(func, args, kwargs)}
    operands = [one for one in flatten((args, kwargs)) if id(one) not in written]
    home = next((one for one in operands if type(one) is ShardTensor), None)
    if home is not None:
        kinds = (_Tensor, torch.nn.Parameter, ShardTensor)
        replicas.compare(
            name.strip("_"), home._meta.mesh,
            [one for one in operands if type(one) in kinds and (one.dim() or one.requires_grad)],
        )
