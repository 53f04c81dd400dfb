"""Attention of whole heads: batch and heads may be sharded, and the features of the values.

So may the queries, where no causal mask ties them to their positions. Grouped-query heads are
sharded at borders of key heads. Dropout depends on the global index, so no rule speaks of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.rules import Call, op, page, rule

__all__ = ["PAGE"]


def _attention(call: Call, wants_grad: Any) -> str | None:
    """`scaled_dot_product_attention(query, key, value, mask)`."""
    query, key, value = (tensor.shape for tensor in call.tensors[:3])
    if call.get("dropout_p") or len(query) < 3:
        return None
    shape = call.results[0].shape
    grouped = call.get("enable_gqa") and key[-3] not in (0, 1, shape[-3])
    lead = (*shape[:-3], key[-3]) if grouped else shape[:-2]
    # torch gives the query's own shape back where there is nothing to attend from or to.
    some = ">0" if query[:-2] != shape[:-2] or not key[:-2] == value[:-2] == lead else ""
    queries, keys = [f"...{some}"], f"...{some}"
    if grouped:
        queries, keys = [f"...{some}", f"(g{some} r)"], f"{keys} g"
    heads, rows = " ".join(queries), "s!" if call.get("is_causal") else "s"
    mask = "".join([", " + _last([*queries, "s", "t"], len(tensor.shape))
                    for tensor in call.tensors[3:]])
    return f"{heads} {rows} q!, {keys} t! q!, {keys} t! e{mask} -> {heads} s e"


def _last(dims: Sequence[str], ndim: int) -> str:
    """The last dims, `...` being any number of them."""
    return " ".join(dims if ndim >= len(dims) - 1 else dims[len(dims) - ndim :])


PAGE = page(
    op("scaled_dot_product_attention", rule(_attention, linear=[2])),
)
