"""Counting: searchsorted, bucketize, histc, isin.

Where a value falls among sorted ones is how many of them are less (or no more), and a count over
all is the sum of the counts over parts. So what is counted may be cut, empty parts included.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from weft.rules.factors import dims, names
from weft.rules.notation import Call, FactorDims, Rule, TensorArg

__all__ = ["RULES"]


def _places(call: Call, among: TensorArg, values: TensorArg | None, whole: bool) -> Rule:
    """The rule of values among sorted ones: in one row, or in rows that correspond."""
    shape = call.results[0].shape
    ndim = len(shape)
    kinds, sizes = dims(ndim), dict(zip(names(ndim), shape), among=among.shape[-1])
    lead: FactorDims = () if len(among.shape) == 1 else kinds[:-1]
    sorted_ones = (*lead, ("among",))
    given = {id(among): sorted_ones} | ({} if values is None else {id(values): kinds})
    return Rule(
        tuple(given.get(id(tensor), sorted_ones) for tensor in call.tensors), (kinds,), sizes,
        {} if whole else {"among": "sum"}, whole=frozenset({"among"} if whole else ()),
    )


def _searchsorted(call: Call) -> Rule:
    """`searchsorted(among, values)`; with a `sorter` the row is not sorted, but whole."""
    among, values = call.args[:2]
    found = values if isinstance(values, TensorArg) else None
    return _places(call, among, found, call.kwargs.get("sorter") is not None)


def _bucketize(call: Call) -> Rule:
    values, among = call.args[:2]
    return _places(call, among, values if isinstance(values, TensorArg) else None, False)


def _histc(call: Call) -> Rule | None:
    """Counts in bins between given ends; without them they are the extrema of the data."""
    low, high = call.arg(2, "min", 0), call.arg(3, "max", 0)
    if low == high or not math.isfinite(low) or not math.isfinite(high):
        return None
    shape = call.tensors[0].shape
    factors = names(len(shape))
    sizes = dict(zip(factors, shape), bins=call.results[0].shape[0])
    return Rule(
        (dims(len(shape)),), ((("bins",),),), sizes,
        dict.fromkeys(factors, "sum"), whole=frozenset({"bins"}),
    )


def _isin(call: Call) -> Rule:
    """`isin(x, among)`: equal to one of them, whichever shard holds it; or inverted to none."""
    x, among = call.args[:2]
    kind = "and" if call.kwargs.get("invert", False) else "or"
    shape = call.results[0].shape
    kinds, sizes = dims(len(shape)), dict(zip(names(len(shape)), shape))
    operands: list[FactorDims] = [kinds] if isinstance(x, TensorArg) else []
    if not isinstance(among, TensorArg):
        return Rule(tuple(operands), (kinds,), sizes)
    inside = [f"a{dim}" for dim in range(len(among.shape))]
    sizes.update(zip(inside, among.shape))
    operands.append(tuple((name,) for name in inside))
    return Rule(tuple(operands), (kinds,), sizes, dict.fromkeys(inside, kind))


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "aten.isin": _isin,
    "aten.searchsorted": _searchsorted, "aten.bucketize": _bucketize, "aten.histc": _histc,
}
