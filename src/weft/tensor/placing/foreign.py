"""Global tensors of other libraries (torch's DTensor) as operands of a call.

`interop`, above, can convert them and fills in `TAKERS`; this file finds them among the arguments
of a call. They have no `__torch_function__`, so calls without a ShardTensor stay theirs. Before
their module is imported there are none, and a call pays one look-up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.errors import UnsupportedOpError
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.calls import written_by
from weft.tensor.trace.trees import flatten, substitute

__all__ = ["TAKERS", "any_foreign", "is_foreign", "taken", "taken_in"]

TAKERS: dict[tuple[str, str], Callable[[Any, BoundMesh | None], ShardTensor]] = {}
"""(module, name) of a class -> the function that makes a ShardTensor of it, on the others' mesh."""


@lru_cache(maxsize=512)
def _taker(kind: type) -> Callable[[Any, BoundMesh | None], ShardTensor] | None:
    names = [(base.__module__, base.__name__) for base in kind.__mro__]
    return next((TAKERS[name] for name in names if name in TAKERS), None)


def is_foreign(value: Any) -> bool:
    """Whether it is a global tensor of another library."""
    return isinstance(value, torch.Tensor) and _taker(type(value)) is not None


def taken(tensor: torch.Tensor, mesh: BoundMesh | None = None) -> torch.Tensor:
    """The ShardTensor of a foreign global tensor; any other tensor as it is."""
    taker = _taker(type(tensor))
    return tensor if taker is None else taker(tensor, mesh)


def any_foreign(args: Any, kwargs: Any) -> bool:
    """Whether there are any among the arguments of a call."""
    for module, _ in TAKERS:
        if module in sys.modules:
            return any(map(is_foreign, flatten((args, kwargs))))
    return False


def taken_in(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
    """The arguments of a call with ShardTensors in place of the foreign tensors; and a function
    that converts the result back.

    An operand that is written to is written in place, because both share their memory; where a
    gradient is due, that is refused.
    """
    tensors = flatten((args, kwargs))
    mesh = next((one.device_mesh for one in tensors if type(one) is ShardTensor), None)
    made = {id(one): taken(one, mesh) for one in tensors if is_foreign(one)}
    written = [one for one in written_by(func, args, kwargs) if is_foreign(one)]
    if written and torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        raise UnsupportedOpError(
            func.__name__, f"it writes to a {type(written[0]).__name__} of shape "
            f"{tuple(written[0].shape)}, and a gradient is due",
            "what is written to a tensor of another library has no place in its graph",
            [type(one).__name__ for one in written],
            "weft.from_dtensor(d) first, and write to that; or write under torch.no_grad()")

    def given_back(out: Any) -> Any:
        for one in written:
            torch.autograd.graph.increment_version(one)
            if out is made[id(one)]:
                out = one
        return out

    feed = iter([made.get(id(one), one) for one in tensors])
    return substitute(args, feed), substitute(kwargs, feed), given_back
