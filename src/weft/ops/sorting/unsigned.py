"""Unsigned integers, whose single elements torch cannot move on CPUs. They are handled as signed
integers of the same width, which have the same order once the highest bit is flipped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from operator import attrgetter

import torch
from torch import Tensor

from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Lookup
from weft.rules import Call, Decision

__all__ = ["SIGNED", "by_bits", "from_order", "to_order"]

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def to_order(x: Tensor) -> Tensor:
    """Signed numbers in the order of the unsigned ones; x itself where torch supports its dtype."""
    signed = SIGNED.get(x.dtype)
    return x if signed is None else x.view(signed) ^ torch.iinfo(signed).min


def from_order(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse."""
    return (x ^ torch.iinfo(x.dtype).min).view(dtype) if dtype in SIGNED else x


def by_bits(lookup: Lookup) -> Lookup:
    """For elements that change position: where the numbers are unsigned and sharded, `lookup`
    answers for signed numbers with the same bits."""
    @wraps(lookup)
    def found(
        call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
    ) -> Algorithm | Decision | None:
        dtype = getattr(torch, call.tensors[0].dtype)
        if dtype not in SIGNED or not any(layouts[0].dims):
            return lookup(call, layouts, wants_grad)
        op, signed = attrgetter(call.op)(torch.ops), SIGNED[dtype]
        return Composite(lambda x, *args: op(x.view(signed), *args).view(dtype))

    return found
