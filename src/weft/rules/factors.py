"""Shared by the families: names of factors, dim arguments, exact conversions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from weft.rules.call import Call
from weft.rules.rule import FactorDims

__all__ = ["carries", "dim_list", "dims", "linear_sets", "names", "one_dim", "packet",
           "sharded_along"]


@lru_cache(maxsize=64)
def names(ndim: int) -> tuple[str, ...]:
    """The factors of a tensor with one factor per dim: d0, d1, ..."""
    return tuple(f"d{dim}" for dim in range(ndim))


@lru_cache(maxsize=64)
def dims(ndim: int) -> FactorDims:
    return tuple((name,) for name in names(ndim))


def one_dim(dim: int, ndim: int) -> int:
    """A dim counted from the front; a tensor without dims has dim 0."""
    return dim % ndim if ndim else 0


def dim_list(value: Any, ndim: int) -> tuple[int, ...]:
    """The dims that a `dim` argument names; None and an empty list mean all."""
    if value is None:
        return tuple(range(ndim))
    if isinstance(value, int):
        value = (value,)
    return tuple(sorted({dim % ndim for dim in value})) if ndim and value else tuple(range(ndim))


def sharded_along(call: Call, default: int | None = None) -> bool:
    """Whether an operand is sharded in a dim that the argument `dim` names."""
    dim = call.get("dim")
    dim = default if dim is None else dim
    return any(
        layout.dims[at] for layout in call.layouts for at in dim_list(dim, layout.ndim))


@lru_cache(maxsize=1024)
def packet(op: str) -> str:
    """The op without its overload, and without the marks of in-place and out= variants.

    >>> packet("aten.add_.Tensor"), packet("aten.__iand__.Scalar")
    ('aten.add', 'aten.bitwise_and')
    """
    head, _, name = op.partition(".")
    name = name.rpartition(".")[0] or name
    if name.startswith("__") and name.endswith("__"):
        return f"{head}.{_DUNDER.get(name.strip('_').removeprefix('i'), name)}"
    return f"{head}.{name.removesuffix('_')}"


_DUNDER = {
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}

# Conversions that commute with a sum of partial values. Floats that widen lose nothing. Integers
# that narrow keep the sum modulo 2^bits, whereas widening would lose the wrap of the narrow sum.
# Between the families, rounding (int to float) or truncation (float to int) breaks it.
# Here are the bits of a number, or of the real part of one, and those of whole numbers.
_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "complex64": 32, "float64": 64,
         "complex128": 64}
_BITS_OF_WHOLE = {"uint8": 8, "int8": 8, "int16": 16, "int32": 32, "int64": 64}


def carries(source: str, target: str) -> bool:
    """Whether partial sums of one dtype may be converted to another one by one."""
    if source == target:
        return source != "bool"
    if source in _BITS and target in _BITS:
        return _BITS[target] >= max(_BITS[source], 32)  # what is narrow is rounded by another
    whole = _BITS_OF_WHOLE
    return source in whole and target in whole and whole[target] <= whole[source]


def linear_sets(
    sets: tuple[tuple[int, ...], ...], operands: Sequence[Any], result: Any
) -> tuple[tuple[int, ...], ...]:
    """The sets whose members are all tensors (a number in a set makes the op affine) of a dtype
    whose partial sums may be converted to that of the result."""
    return tuple([
        members for members in sets
        if all(
            member < len(operands) and carries(operands[member].dtype, result.dtype)
            for member in members
        )
    ])
