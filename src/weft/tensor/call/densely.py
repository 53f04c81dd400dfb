"""Ops of which torch is asked for a sparse gradient: that of a ShardTensor is dense.

Its blocks are; the value is the same, and an optimizer of any kind but SparseAdam takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.calls import facts
from weft.tensor.trace.capture import Trace
from weft.tensor.trace.trees import fill, flatten, slots_of

__all__ = ["as_op", "densely"]


def densely(func: Any, trace: Trace, tensors: Sequence[torch.Tensor]) -> tuple[Any, Trace]:
    """A call of one op, which is what runs then if the gradient was to be sparse."""
    (op,) = trace.ops
    flag = facts(op.overload).sparse
    if flag is None or type(tensors[op.args[0].index]) is not ShardTensor:
        return func, trace
    name, at = flag
    args, kwargs = list(op.args), dict(op.kwargs)
    if at < len(args):
        asked, args[at] = args[at], False
    else:
        asked = kwargs.pop(name, False)
    if not asked:
        return func, trace
    return op.overload, replace(trace, ops=(replace(op, args=tuple(args), kwargs=kwargs),))


def as_op(run: Callable[[Any, Any, Any], Any], trace: Trace) -> Callable[[Any, Any, Any], Any]:
    """`run`, of the op of the trace instead of the function that was called."""
    (op,) = trace.ops

    def with_op(func: Any, args: Any, kwargs: Any) -> Any:
        values = dict(enumerate(flatten((args, kwargs))))
        out = run(op.overload, fill(op.args, values), fill(op.kwargs, values))
        values.update(zip([slot.index for slot in slots_of(op.results)], flatten(out)))
        return fill(trace.result, values)

    return with_op
