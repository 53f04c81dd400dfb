"""Shared by the families: names of factors, dim arguments, exact conversions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from weft.rules.call import Call
from weft.rules.rule import FactorDims

__all__ = [
    "IDENTITY", "carries", "dim_list", "dims", "linear_sets", "names", "one_dim", "packet",
    "sharded_along",
]

IDENTITY = ((0,),)
"""The linear sets of an op that is linear in its only operand."""


@lru_cache(maxsize=64)
def names(ndim: int) -> tuple[str, ...]:
    """The factors of a tensor with one factor per dim: d0, d1, ..."""
    return tuple(f"d{dim}" for dim in range(ndim))


@lru_cache(maxsize=64)
def dims(ndim: int) -> FactorDims:
    """The dims of a tensor with one factor each."""
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
_CARRIES: Mapping[str, frozenset[str]] = {
    "float16": frozenset({"float32", "float64", "complex64", "complex128"}),
    "bfloat16": frozenset({"float32", "float64", "complex64", "complex128"}),
    "float32": frozenset({"float64", "complex64", "complex128"}),
    "float64": frozenset({"complex128"}),
    "complex64": frozenset({"complex128", "float32", "float64"}),
    "complex128": frozenset({"float64"}),
    "int64": frozenset({"int32", "int16", "int8", "uint8"}),
    "int32": frozenset({"int16", "int8", "uint8"}),
    "int16": frozenset({"int8", "uint8"}),
    "int8": frozenset({"uint8"}),
    "uint8": frozenset({"int8"}),
}


def carries(source: str, target: str) -> bool:
    """Whether partial sums of one dtype may be converted to another one by one."""
    if source == target:
        return source != "bool"
    return target in _CARRIES.get(source, ())


def linear_sets(
    sets: tuple[tuple[int, ...], ...], operands: Sequence[Any], result: Any
) -> tuple[tuple[int, ...], ...]:
    """The sets whose members are all tensors (a number in a set makes the op affine) of a dtype
    whose partial sums may be converted to that of the result."""
    return tuple([
        members for members in sets
        if all(
            member < len(operands) and (
                operands[member].dtype == result.dtype != "bool"
                or carries(operands[member].dtype, result.dtype)
            )
            for member in members
        )
    ])
