"""A gathered parameter whose data travelled in autocast's dtype.

Autocast casts a parameter wherever a product uses it, so it is cast before it is gathered.
Meanwhile its local tensor is of the class `CastWeight`: it has the parameter's own dtype, and no
data of that dtype. A call whose operands autocast would cast takes `cast_of` it (`call.varying`).
Any other use reaches `__torch_function__`, or `unwrap_view`, which
gather the parameter in its own dtype first: a collective, and the same one on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.tensor.trace.trees import map_tensors

__all__ = ["CastWeight", "cast_of", "cast_weight", "gathered"]

_OF_THE_CAST = frozenset([
    getattr(Tensor, name).__get__
    for name in ("_version", "device", "is_leaf", "layout", "ndim", "requires_grad", "shape")
])
"""Attributes that it has in common with its cast: to read one is no use of the data."""


class CastWeight(torch.Tensor):
    """Represents the whole parameter. `_weft_cast` is the leaf of autocast's dtype that graphs see,
    `_weft_gather` returns the parameter in its own dtype."""

    _weft_cast: Tensor
    _weft_gather: Callable[[], Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _OF_THE_CAST:
            return func(args[0]._weft_cast)
        return func(*map_tensors(gathered, args), **map_tensors(gathered, kwargs or {}))


def cast_weight(cast: Tensor, gather: Callable[[], Tensor]) -> CastWeight:
    """The `CastWeight` of a parameter of which there is `cast`."""
    out: Any = cast.detach().view_as(cast)
    out.__class__ = CastWeight
    out._weft_cast, out._weft_gather = cast, gather
    return out


def cast_of(local: CastWeight) -> Tensor:
    """The leaf of autocast's dtype."""
    with torch._C.DisableTorchFunctionSubclass():
        return local._weft_cast


def gathered(local: Tensor) -> Tensor:
    """The local tensor; for such a parameter the one that has its own dtype."""
    return local._weft_gather() if type(local) is CastWeight else local
