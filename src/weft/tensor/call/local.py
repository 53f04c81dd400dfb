"""The function for local tensors: the called function or its op, on copies if necessary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from types import FunctionType
from typing import Any

import torch
from torch.autograd.grad_mode import _force_original_view_tracking

from weft.tensor.trace.trees import flatten, map_tensors
from weft.transport.execute import unshared

__all__ = [
    "apart", "as_it_is", "as_leaf", "copying", "is_builtin", "is_torchs_own", "nothing",
    "packed", "replayed",
]

_BUILTINS = (type(torch.add), type(torch.Tensor.add))
_SLOTS = type(torch.Tensor.__getitem__)


def is_torchs_own(func: Any) -> bool:
    """Whether it is written in C: it passes its arguments to an op, and returns its result."""
    return isinstance(func, _BUILTINS)


def is_builtin(func: Any) -> bool:
    """Whether a function passes its arguments on as they are: torch's own, and methods of
    Tensor."""
    return is_torchs_own(func) or (
        isinstance(func, FunctionType) and func.__module__ == "torch._tensor"
    )


def as_it_is(func: Any) -> bool:
    """Whether the called function itself may run on the local tensors, if it is one op.

    Other functions in Python check their arguments and may refuse a shard: `group_norm` asks for
    two values of each mean.
    """
    return is_builtin(func) or isinstance(func, _SLOTS)


def as_leaf(local: Any) -> Any:
    """The op, whose result requires a gradient: ops do not take `requires_grad=`."""
    return lambda *args, **kwargs: local(*args, **kwargs).requires_grad_()


def copying(local: Any) -> Any:
    """The op, whose results never share memory with its operand. (torch returns the operand itself
    if it needs no change.)"""
    return lambda x, *args, **kwargs: map_tensors(
        lambda one: unshared(one, x), local(x, *args, **kwargs)
    )


def packed(local: Any) -> Any:
    """The op on a copy without gaps."""
    return lambda x, *args, **kwargs: local(
        x.clone(memory_format=torch.contiguous_format), *args, **kwargs
    )


def nothing(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> Callable[..., Any]:
    """The results of a rank that has no elements of one of them, in place of the op."""
    def run(*args: Any, **kwargs: Any) -> Any:
        given = flatten((args, kwargs))[0]
        made = [given.new_zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes)]
        return tuple(made) if len(made) > 1 else made[0]

    return run


def replayed(local: Any) -> Any:
    """The op, whose results without elements autograd makes again as they were made, where they are
    views, after a write to their base. Else it would use `as_strided`, whose gradient, of nothing,
    is a constant: this rank would not take part in second derivatives."""
    def run(*args: Any, **kwargs: Any) -> Any:
        with _force_original_view_tracking(True):
            return local(*args, **kwargs)

    return run


def apart(local: Any) -> Any:
    """The op, whose results share no memory with an operand: a kernel may return nothing as a view
    of nothing, and a write to the one would count as a write to the other, on this rank alone."""
    def run(*args: Any, **kwargs: Any) -> Any:
        out, given = local(*args, **kwargs), flatten((args, kwargs))
        return map_tensors(lambda one: reduce(unshared, given, one), out)

    return run
