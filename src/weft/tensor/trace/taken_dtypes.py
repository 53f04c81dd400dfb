"""Dtypes that torch's kernels refuse and its meta kernels take.

A meta kernel does not know for which dtypes its op's kernel is written. Ranks with data would raise
where an op meets such dtypes, some after they have sent something, and ranks without would go on.
So an op that is recorded is also run on tensors of one element, once for the dtypes of its
operands and the types of its numbers. Only an error that is about dtypes counts, or about how many
dims there are.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from weft.tensor.meta import bounded_put
from weft.tensor.trace.trees import flatten, leaves, map_tensors

__all__ = ["check_dtypes", "try_dtypes"]

_OF_DTYPES = re.compile(
    r"not implemented for|not support|type|complex|float|integ|expected \d dims|broadcast shape",
    re.IGNORECASE)
"""And of numbers of dims, which these tensors have as well."""

_MOST = 1 << 16
"""What the numbers of a call may give when multiplied: they may be lengths of a result."""

_neg: Any = torch.neg

_LENGTHS = 1, 4
"""Of the dims of operands, at most: first the shortest."""

_NUMBERS = int, float, complex
"""Of which the types alone count, because most are lengths and dims."""

_OTHERS: Any = (*_NUMBERS, str, torch.dtype, type(None))

_TAKEN: dict[Any, bool] = {}

_MAX_TAKEN = 4096


def check_dtypes(calls: Sequence[tuple[Any, Any, Any, Any]]) -> None:
    """Raise the error of the first call whose kernel, on a CPU, does not take its operands' dtypes.

    Each is an op, its arguments and keywords, and its result, on meta tensors. One whose operands
    or results have no elements is left: a kernel that has nothing to do takes any dtype.
    """
    for overload, args, kwargs, out in calls:
        if not _is_public(overload):
            continue
        tensors = flatten((args, kwargs))
        key = overload, *[(one.dtype, one.dim()) for one in tensors], *[
            type(one) if type(one) in _NUMBERS else one for one in leaves((args, kwargs), _OTHERS)]
        if key in _TAKEN or not all(one.numel() for one in (*tensors, *flatten(out))):
            continue
        numbers = leaves((args, kwargs), int)
        if math.prod([max(abs(number), 1) for number in numbers]) <= _MOST:
            try_dtypes(overload, args, kwargs)
        bounded_put(_TAKEN, key, True, _MAX_TAKEN)


@cache
def _is_public(overload: Any) -> bool:
    """Whether an op computes and checks its arguments: torch's inner ops and gradients may trust
    them, and those that take pivots, whose zeros name no row. Neither draws nor is a view."""
    if not isinstance(overload, OpOverload) or overload.namespace != "aten":
        return False
    schema, name = overload._schema, overload._opname
    return not (
        name.startswith("_") or name.endswith("_backward")
        or torch.Tag.nondeterministic_seeded in overload.tags
        or any("pivots" in argument.name for argument in schema.arguments)
        or any(one.alias_info is not None and not one.alias_info.is_write
               for one in schema.returns)
    )


def try_dtypes(func: Any, args: Any, kwargs: Any) -> None:
    """Raise what a function raises of dtypes alone, on tensors of one element, or of few where it
    takes no such shapes."""
    for longest in _LENGTHS:
        error = _error_of(func, args, kwargs, "cpu", longest)
        if error is None:
            return
        if _OF_DTYPES.search(str(error)) and (
                _error_of(func, args, kwargs, "meta", longest) is None):
            try:
                raise error
            finally:
                del error  # whose traceback holds this frame


def _error_of(
    func: Any, args: Any, kwargs: Any, device: str, longest: int
) -> Exception | None:
    def short(tensor: torch.Tensor) -> torch.Tensor:
        shape = [min(length, longest) for length in tensor.shape]
        return torch.zeros(shape, dtype=tensor.dtype, device=device)

    given, named = map_tensors(short, (args, kwargs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _neg(_Heard(lambda: func(*given, **named)))
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            return error.with_traceback(None)  # its frames hold those of the whole program
    return None


class _Heard:
    """A call inside one of torch's functions, which make Python's warnings of those of kernels."""

    def __init__(self, call: Any) -> None:
        self.call = call

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return args[0].call()
