"""Counting: searchsorted, bucketize, histc, isin, pointers of rows.

The position of a value among sorted values is the number of those that are less (or not greater),
and a count over the whole is the sum of the counts over its parts. So the counted dim may be
sharded, empty shards included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.rules import Call, TensorArg, op, page, rule

__all__ = ["PAGE"]


def _search_rule(call: Call, wants_grad: Sequence[bool]) -> str:
    """Counts of smaller values stay partial, and their reduction receives the result twice; or the
    sorted values are whole, where they are fewer. With a `sorter` they are unsorted, hence
    whole."""
    is_first = call.op.startswith("aten.searchsorted")
    values, among = call.args[:2][:: -1 if is_first else 1]
    sorter = call.get("sorter")
    fewer = math.prod(among.shape) <= math.prod(call.results[0].shape)
    row = "a!" if fewer or sorter is not None else "a"
    lead, last = ("... ", "... v") if len(among.shape) > 1 else ("", "...")
    given = [f"{lead}{row}"] + [last] * isinstance(values, TensorArg)
    operands = [*(given if is_first else given[::-1]), *[f"{lead}a"] * (sorter is not None)]
    return f"{', '.join(operands)} -> {last if len(given) > 1 else ''}"


def _has_ends(call: Call) -> bool:
    """Without given ends, bins lie between the extrema of the data."""
    low, high = call.get("min"), call.get("max")
    return low != high and math.isfinite(low) and math.isfinite(high)


def _histc(x: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    """Bins between the extrema of the data, which are read."""
    if min != max:
        return NotImplemented
    if min == 0 and x.numel():
        min, max = (end.item() for end in torch.aminmax(x.detach()))
    if min == max:
        min, max = min - 1, max + 1
    return torch.histc(x, bins, min, max)


def _isin_rule(call: Call, wants_grad: Sequence[bool]) -> str:
    """Equal to a value in any shard; inverted: equal to a value in none."""
    x, among = call.args[:2]
    kind = "and" if call.get("invert") else "or"
    operands = ["..."] if isinstance(x, TensorArg) else []
    if isinstance(among, TensorArg):
        operands.append(" ".join([f"a{dim}:{kind}" for dim in range(len(among.shape))]))
    return f"{', '.join(operands)} -> {'...' if isinstance(x, TensorArg) else ''}"


PAGE = page(
    op("_convert_indices_from_coo_to_csr", rule("e -> p!")),
    op("histc", rule("... s -> b!", along="dim", serves=_has_ends), compose=_histc),
    op("isin", rule(_isin_rule)),
    op("searchsorted bucketize", rule(_search_rule, by_size=True)),
)
