"""Reduces partial values on one rank: torch's own arithmetic, one by one in rank order.

Each element's result depends only on its partial values, not on its place in a buffer, so
all-reduce and reduce-scatter agree bitwise. Narrow floats are added in float32 and rounded
once. NaN survives max and min; bool sums are "any".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.core import KINDS
from weft.errors import PlacementError

__all__ = ["check_kind", "reduce_partials"]

_STEP: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": Tensor.add_,
    "avg": Tensor.add_,
    "product": Tensor.mul_,
    "max": lambda total, one: torch.maximum(total, one, out=total),
    "min": lambda total, one: torch.minimum(total, one, out=total),
    "and": Tensor.logical_and_,
    "or": Tensor.logical_or_,
    "band": Tensor.bitwise_and_,
    "bor": Tensor.bitwise_or_,
    "bxor": Tensor.bitwise_xor_,
}
"""The step of each kind, in place on the running total."""

_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
} | {
    getattr(torch, name): torch.float32
    for name in dir(torch) if name.startswith("float8_")
}
"""Dtypes that are reduced in a wider one: narrow floats, and those without arithmetic in torch."""


def check_kind(kind: str, dtype: torch.dtype) -> None:
    """Raise PlacementError for a reduction that a dtype cannot carry exactly."""
    if kind not in KINDS:
        fault, rule = "is no kind of reduction", f"the kinds are {', '.join(KINDS)}"
    elif kind == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        fault, rule = "is not exact", "avg is for floating-point and complex values"
    elif kind in ("max", "min") and dtype.is_complex:
        fault, rule = "is not defined", "max and min need an order, which complex numbers lack"
    elif kind in ("band", "bor", "bxor") and (dtype.is_floating_point or dtype.is_complex):
        fault, rule = "is not defined", "bitwise kinds are for integers and bools"
    else:
        return
    raise PlacementError(
        "reduction",
        f"{kind!r} of partial values of {str(dtype).removeprefix('torch.')} {fault}", rule,
        [repr(kind)], 'Partial("sum"), or another dtype')


def reduce_partials(partials: Sequence[Tensor], kind: str, out: Tensor | None = None) -> Tensor:
    """The reduction of `partials` (equal shapes and dtypes), in order: `out`, or a new tensor.

    `out` shares no memory with any of them.
    """
    if out is not None:
        if out.dtype in _WIDE or out.dtype is torch.uint64:
            return out.copy_(reduce_partials(partials, kind))
        return _reduce(out.copy_(partials[0]), partials, kind)
    dtype = partials[0].dtype
    if dtype is torch.uint64:
        return _reduce_uint64(partials, kind)
    wide = _WIDE.get(dtype, dtype)
    return _reduce(partials[0].to(wide, copy=True), partials, kind).to(dtype)


def _reduce(total: Tensor, partials: Sequence[Tensor], kind: str) -> Tensor:
    wide, step = total.dtype, _STEP[kind]
    for one in partials[1:]:
        step(total, one.to(wide))
    if kind == "avg":
        total.div_(len(partials))
    return total


def _reduce_uint64(partials: Sequence[Tensor], kind: str) -> Tensor:
    """As int64, which has the same bits for sums and products; its order begins at the sign bit."""
    bits = [one.view(torch.int64) for one in partials]
    if kind not in ("max", "min"):
        return reduce_partials(bits, kind).view(torch.uint64)
    first = torch.iinfo(torch.int64).min
    best = reduce_partials([one ^ first for one in bits], kind)
    return best.bitwise_xor_(first).view(torch.uint64)
