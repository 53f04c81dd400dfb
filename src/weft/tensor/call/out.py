"""`f(..., out=target)`: the recipe of f, then a write to a target that keeps its layout.

A plain target receives the full value.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from weft.comm import BoundMesh
from weft.errors import UnsupportedOpError
from weft.tensor.call.recipe import Function, Recipe
from weft.tensor.call.torchs_errors import in_torchs_words
from weft.tensor.placing.draw import torch_draws
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.capture import meta_like, unwatched
from weft.tensor.trace.taken_dtypes import try_dtypes
from weft.tensor.trace.trees import flatten, map_tensors

__all__ = ["function_of", "without_out", "writing"]


def function_of(func: Any) -> Any:
    """The function that computes the value which a call with `out=` writes."""
    return func.overloadpacket if isinstance(func, OpOverload) else func


def without_out(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of the call without `out=`."""
    return {name: value for name, value in kwargs.items() if name != "out"}


def writing(func: Any, args: Any, kwargs: Any, inner: Recipe | None) -> Function:
    """The recipe of a call with `out=`, which returns the target, or nothing, as torch does.

    It raises torch's errors, and UnsupportedOpError where a sharded target would have to change its
    shape. `inner` is the recipe of the call without; None where only the target is sharded.
    """
    name = getattr(func, "__name__", str(func))
    targets = flatten(kwargs["out"])
    asked = any(one.requires_grad for one in flatten((args, kwargs)))
    may_want = any(one.is_floating_point() or one.is_complex() for one in targets)
    if torch.is_grad_enabled() and asked and may_want:
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, "
            "but one of the arguments requires grad."
        )
    form = _check_targets(func, args, kwargs)
    if inner is None:
        inner = _drawn(next(one._meta.mesh for one in targets if type(one) is ShardTensor))
    function, gives_nothing = function_of(func), _gives_nothing(name)

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        target = kwargs["out"]
        value = inner.run(function, args, without_out(kwargs))
        for one, result in zip(flatten(target), flatten(value)):
            _write(name, one, result)
        return None if gives_nothing else target if form is None else form(target)

    return Function(run)


def _check_targets(func: Any, args: Any, kwargs: Any) -> type | None:
    """Raise what torch raises of the targets, of which the call without them knows nothing: many
    kernels take one dtype alone. The named tuple that torch returns; None of other results."""
    metas = map_tensors(meta_like, args), map_tensors(meta_like, kwargs)
    state = torch.default_generator.get_state()
    try:
        with unwatched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = func(*metas[0], **metas[1])
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        told = in_torchs_words(error, func, args, kwargs)
        if told is error:
            return None
        try:
            raise told from None
        finally:
            del told  # whose traceback holds this frame
    else:
        if all(one.device.type == "cpu" for one in flatten((args, kwargs))):
            try_dtypes(func, *metas)
        return type(made) if isinstance(made, tuple) and type(made) is not tuple else None
    finally:
        torch.default_generator.set_state(state)


def _drawn(mesh: BoundMesh) -> Function:
    """A call on plain tensors, or on nothing, like torch.rand: the same on all ranks."""
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        with torch_draws(mesh):
            return func(*args, **kwargs)

    return Function(run)


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


def _write(name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(
            f"result type {value.dtype} can't be cast to the desired output type {target.dtype}"
        )
    if target.shape != value.shape:
        if type(target) is ShardTensor or target.numel():
            raise UnsupportedOpError(
                f"{name}(out=)", f"the target has shape {tuple(target.shape)}, the result "
                f"{tuple(value.shape)}", "a target is written to, never resized",
                [tuple(target.shape)], f"out=weft.empty{tuple(value.shape)}")
        target.resize_(value.shape)
    target.copy_(value)
