"""Scaled dot-product attention: batch, heads, both sequences and the values' features may be
sharded.

Where queries and keys are sharded over the same axes, queries stay. Either heads are exchanged for
the sequence, or blocks of keys are sent to the queries, whichever sends less. Where the queries are
whole, as in decoding, the results of each rank's keys are merged: a few numbers per query, however
long the keys are. Grouped-query heads are sharded at borders of key heads. With dropout it is
composed of products and a softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops.attending.fused import ATTENTION
from weft.ops.attending.ordered import default_scale
from weft.ops.attending.sequence import masked_weights
from weft.ops.attending.ways import Attention, Drops
from weft.ops.precision import wide
from weft.rules import Call, op, page, rule
from weft.transport import Shards

__all__ = ["PAGE"]


def _string(call: Call, few: bool = False) -> str | None:
    """`few`: heads of queries are sharded by themselves, and those of keys are whole."""
    query, key, value = (tensor.shape for tensor in call.tensors[:3])
    ndim = len(key)
    if len(query) < 3 or (ndim > 2 and query[-3] and not key[-3]):
        return None
    shape = call.results[0].shape
    if call.get("enable_gqa") and key[-3] != value[-3]:
        return None
    grouped = call.get("enable_gqa") and key[-3] not in (0, 1, shape[-3])
    # torch gives the query's own shape back where there is nothing to attend from or to.
    some = ">0" if query[:-2] != shape[:-2] else ""
    queries, keys = [f"...{some}"], f"...{some}"
    if grouped:
        queries, keys = [*queries, "h" if few else f"(g{some} r)"], f"{keys} {'g!' if few else 'g'}"
    heads = " ".join(queries)
    placed = call.get("is_causal") or call.get("dropout_p")  # positions matter
    rows = f"{heads}{'~' * few} {'s~' if placed else f's{some}'}"
    mask = "".join([", " + _last([*queries, "s", "t"], len(tensor.shape))
                    for tensor in call.tensors[3:]])
    return f"{rows} q!, {keys} t~s q!, {keys} t~s e{some}{mask} -> {heads} s e"


def _last(dims: Sequence[str], ndim: int) -> str:
    """The last dims, `...` being any number of them."""
    return " ".join(dims if ndim >= len(dims) - 1 else dims[len(dims) - ndim :])


def _over_sequence(
    shards: Shards, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Queries stay; blocks of keys come to them, or heads are exchanged. If queries are whole, the
    results of each rank's keys are merged."""
    scale = default_scale(query) if scale is None else scale
    masks = [] if mask is None else [mask]
    drops = None
    if dropout_p:
        assert shards.next_key is not None
        drops = Drops(shards.next_key(), dropout_p, query.device, wide(query.dtype))
    made = Attention.of(shards, is_causal, enable_gqa)
    return made.attend([query, key, value, *masks], scale, shards.moved, drops)


def _with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:
    """With dropout: a product, a softmax whose weights are dropped out, and a product."""
    if enable_gqa and not key.shape[-3]:
        return NotImplemented
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        heads = query.shape[-3]
        key, value = (one.repeat_interleave(heads // one.shape[-3], -3) for one in (key, value))
    scale = default_scale(query) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        mask = query.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = scores.softmax(-1) if mask is None else masked_weights(scores, mask)
    return torch.dropout(weights, p, True) @ value


_FUSED_NDIM = (3, 4) if torch.__version__ >= "2.14" else (4,)
"""How many dims the operands of torch's fused kernel may have."""


def _result(
    query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:
    """Of the plain cases: torch's meta kernel is a composition in Python."""
    batch = query.shape[:-2]
    if attn_mask is not None:
        _refuse_shape(attn_mask.shape, (*query.shape[:-1], key.shape[-2]))
    if (
        dropout_p or query.ndim < 3
        or not query.is_floating_point() or query.dtype != key.dtype or key.dtype != value.dtype
        or key.shape[:-2] != value.shape[:-2] or key.shape[-2] != value.shape[-2]
        or query.shape[-1] != key.shape[-1] or 0 in query.shape or 0 in key.shape
        or not (key.shape[:-2] == batch or (enable_gqa and _in_groups(query, key)))
    ):
        return None
    if (
        query.ndim in _FUSED_NDIM and query.shape[-1] == value.shape[-1]
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and (attn_mask is None or _masks(attn_mask, query, key))
        and torch.backends.cuda.flash_sdp_enabled()
    ):
        # The fused kernel, whose result lies as the queries do (what torch asks before it takes
        # that: aten/native/transformers/sdp_utils_cpp.cpp). Heads are a view of the features, and
        # to flatten them into features again is a view, too. Torch's meta kernel knows only the
        # composition of matmuls.
        return torch.empty_like(query)
    if attn_mask is not None or enable_gqa:
        return None
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _refuse_shape(mask: torch.Size, scores: tuple[int, ...]) -> None:
    """Raise where a mask does not fit scores, with torch's text: its meta kernel has another."""
    if any(mine != other and 1 not in (mine, other)
           for mine, other in zip(reversed(mask), reversed(scores))):
        torch.empty(()).expand(scores).add(torch.empty(()).expand(mask))
    if torch.broadcast_shapes(mask, scores) != scores:  # it is added in place
        torch.empty(scores, device="meta").add_(torch.empty(mask, device="meta"))


def _in_groups(query: Tensor, key: Tensor) -> bool:
    """Several heads of the queries to one of the keys."""
    return (
        query.ndim == key.ndim and query.shape[:-3] == key.shape[:-3]
        and query.shape[-3] % key.shape[-3] == 0
    )


def _masks(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether it is a mask that the fused kernel takes."""
    whole = (*query.shape[:-1], key.shape[-2])
    return (
        mask.dtype in (torch.bool, query.dtype) and mask.ndim in (2, 4)
        and not mask.requires_grad
        and all(mine in (1, other) for mine, other in zip(reversed(mask.shape), reversed(whole)))
    )


def _has_few_keys(call: Call) -> bool:
    """Whether the heads of queries have more shards than there are heads of keys."""
    if not call.get("enable_gqa") or len(call.results[0].shape) < 3 or not call.layouts:
        return False
    query, key = call.layouts[:2]
    return 1 < key.shape[-3] < min(query.num_shards(query.ndim - 3), query.shape[-3])


def _is_by_kernel(call: Call) -> bool:
    """Dropout over a sharded sequence goes by the global index of each weight. Where there are more
    shards of heads than heads of keys, those of queries alone are sharded."""
    special = call.get("dropout_p") or _has_few_keys(call)
    return bool(special) and call.tensors[0].shape[:-2] == call.results[0].shape[:-2]


def _by_kernel(call: Call, wants_grad: Any) -> str | None:
    return _string(call, few=_has_few_keys(call))


def _attention(call: Call, wants_grad: Any) -> str | None:
    """`scaled_dot_product_attention(query, key, value, mask)`."""
    return None if call.get("dropout_p") else _string(call)


PAGE = page(
    op("scaled_dot_product_attention",
       rule(_by_kernel, serves=_is_by_kernel, needs_kernel=True, by_size=True),
       rule(_attention, linear=[2]),
       kernel=_over_sequence, compose=_with_dropout, each_call=True, result=_result,
       local=ATTENTION if torch.__version__ < "2.13" else None),
)
