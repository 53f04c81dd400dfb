"""`f(..., out=target)`: the value of f, written to a target that keeps its layout.

A plain target receives the full value.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from weft.errors import UnsupportedOpError, message
from weft.tensor.placing.draw import torch_draws
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.trees import flatten

__all__ = ["write_out"]


def write_out(func: Any, args: Any, kwargs: Any) -> Any:
    """Carry out a call with `out=`; gives the target, or nothing, as torch does.

    Raises:
        RuntimeError: what torch refuses: a gradient is wanted, or the dtype cannot be cast.
        UnsupportedOpError: the target would have to change its shape.
    """
    target = kwargs["out"]
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    name = getattr(func, "__name__", str(func))
    asked = any(one.requires_grad for one in flatten((args, kwargs)))
    if torch.is_grad_enabled() and asked and any(map(_may_want_grad, flatten(target))):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, "
            "but one of the arguments requires grad."
        )
    function = func.overloadpacket if isinstance(func, OpOverload) else func
    meta = next((one._meta for one in flatten(target) if type(one) is ShardTensor), None)
    if meta is None or ShardTensor in map(type, flatten((args, rest))):
        value = function(*args, **rest)
    else:  # of plain tensors, or of nothing, like torch.rand: the same on all ranks
        with torch_draws(meta.mesh):
            value = function(*args, **rest)
    for one, result in zip(flatten(target), flatten(value)):
        _write(name, one, result)
    return None if _gives_nothing(name) else target


@functools.cache
def _gives_nothing(name: str) -> bool:
    """Whether torch's op writes to its targets and returns none of them: those of a list do so."""
    packet = getattr(torch.ops.aten, name.split(".")[0], None)
    if not isinstance(packet, OpOverloadPacket):
        return False
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return any(
        not schema.returns and any(argument.is_out for argument in schema.arguments)
        for schema in schemas
    )


def _may_want_grad(target: torch.Tensor) -> bool:
    """What gives indices or truth values has no gradient, whatever its operands want."""
    return target.is_floating_point() or target.is_complex()


def _write(name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(
            f"result type {value.dtype} can't be cast to the desired output type {target.dtype}"
        )
    if target.shape != value.shape:
        if type(target) is ShardTensor or target.numel():
            raise UnsupportedOpError(
                message(f"{name}(out=)", f"the target has shape {tuple(target.shape)}, the result "
                        f"{tuple(value.shape)}", "a target is written to, never resized",
                        [tuple(target.shape)], f"out=weft.empty{tuple(value.shape)}")
            )
        target.resize_(value.shape)
    target.copy_(value)
