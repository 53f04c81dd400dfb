"""Calls with an op that cannot be a step, because it writes, draws or needs data: each op is a
call of its own on the ShardTensors.

Ranks outside the mesh do the same, because no step runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.tensor.call import reduce_once
from weft.tensor.call.recipe import Function, Recipe
from weft.tensor.members import hooks
from weft.tensor.placing.draw import torch_draws
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.calls import facts, returned
from weft.tensor.trace.capture import Op, Trace
from weft.tensor.trace.trees import fill, flatten, slots_of

__all__ = ["applied", "as_calls", "op_by_op"]

Compose = Callable[[Sequence[Any]], Any]
"""What makes other calls on the tensors of one."""


def as_calls(
    compose: Compose, trace: Trace, results: Any, target: int | None = None, *,
    writes: bool = False, is_leaf: bool = False, otherwise: Recipe | None = None,
) -> Function:
    """The recipe of a call that `compose` carries out.

    Args:
        trace: that of the call. results: its Slots for the results of `compose`.
        target: the tensor that the call writes to.
        writes: whether `compose` writes to it by itself.
        is_leaf: whether the result is asked to require a gradient.
        otherwise: the recipe if `compose` returns NotImplemented.
    """

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        tensors: list[Any] = flatten((args, kwargs))
        given = list(tensors)
        if target is not None and torch.is_grad_enabled():
            given[target] = tensors[target].clone()  # ops may save its old value for backward
        with reduce_once.disabled():
            out = compose(given)
        if out is NotImplemented and otherwise is not None:
            return otherwise.run(func, args, kwargs)
        if writes and all(slot.index < len(tensors) for slot in slots_of(trace.result)):
            return fill(trace.result, tensors)
        if target is not None:
            return tensors[target] if out is given[target] else tensors[target].copy_(out)
        if is_leaf:
            out.requires_grad_()
        return returned(trace, tensors, results, out)

    return Function(run)


def applied(function: Callable[..., Any], op: Op) -> Compose:
    """A composition, which calls ops as users do, on the op's arguments."""
    return lambda given: function(*fill(op.args, given), **fill(op.kwargs, given))


def op_by_op(trace: Trace, mesh: BoundMesh) -> Compose:
    """The ops of a trace, one after the other."""

    def compose(given: Sequence[Any]) -> Any:
        values: dict[int, Any] = dict(enumerate(given))
        for op in trace.ops:
            args, kwargs = fill(op.args, values), fill(op.kwargs, values)
            out = _call(op, args, kwargs, values[0].device, mesh)
            values.update(zip([slot.index for slot in slots_of(op.results)], flatten(out)))
        return fill(trace.result, values)

    return compose


def _call(op: Op, args: Any, kwargs: Any, device: torch.device, mesh: BoundMesh) -> Any:
    if any(type(tensor) is ShardTensor for tensor in flatten((args, kwargs))):
        return hooks.call(op.overload, args, kwargs)
    if kwargs.get("device") is not None:  # captured on meta tensors
        kwargs["device"] = device
    if facts(op.overload).is_random:
        with torch_draws(mesh):
            return op.overload(*args, **kwargs)
    return op.overload(*args, **kwargs)
