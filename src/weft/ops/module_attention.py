"""Attention of modules, by ops that keep dims separate, so that each may be sharded.

torch's own code joins batch and heads into one dim, and positions and batch into another. A shard
of the batch is no block of such a dim. Here all stay separate dims.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.rules import Call, op, page, rule
from weft.transport import Shards

__all__ = ["PAGE"]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int,
    in_weight: Tensor | None, in_bias: Tensor | None, bias_k: Tensor | None,
    bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float, out_weight: Tensor,
    out_bias: Tensor | None, training: bool = True, key_padding_mask: Tensor | None = None,
    need_weights: bool = True, attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None, static_v: Tensor | None = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A batch, heads or query positions that are sharded stay where they are."""
    weights: Any = (
        [q_proj_weight, k_proj_weight, v_proj_weight] if use_separate_proj_weight
        else [None] * 3 if in_weight is None else in_weight.chunk(3)
    )
    if static_k is not None or static_v is not None or (bias_k is None) is not (bias_v is None) or (
        any(weight is None for weight in weights)
        or not _fits(query, key, value, embed_dim, num_heads, use_separate_proj_weight)
        or not _masks_fit(query, key, num_heads, key_padding_mask, attn_mask, is_causal)
    ):
        return NotImplemented  # what it raises or warns of is left to torch's own
    biases = [None] * 3 if in_bias is None else in_bias.chunk(3)
    given = [one if one.dim() == 3 else one.unsqueeze(1) for one in (query, key, value)]
    q, k, v = (F.linear(*three) for three in zip(given, weights, biases))
    more = 0
    if bias_k is not None and bias_v is not None:
        k, v = (torch.cat([one, bias.expand(1, one.shape[1], -1)])
                for one, bias in ((k, bias_k), (v, bias_v)))
        more += 1
    if add_zero_attn:
        k, v = (torch.cat([one, torch.zeros_like(one[:1])]) for one in (k, v))
        more += 1
    q, k, v = (one.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for one in (q, k, v))
    hides = not (is_causal and key_padding_mask is None and not need_weights)
    mask = _mask(attn_mask if hides else None, key_padding_mask, num_heads, more, query.dtype)
    dropout_p = dropout_p if training else 0.0
    found = None
    if need_weights and average_attn_weights and not dropout_p:
        out, found = _averaged(q, k, v, mask)
    elif need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        scores = (scores if mask is None else scores + mask).softmax(-1)
        out = (F.dropout(scores, dropout_p) if dropout_p > 0.0 else scores) @ v
        found = scores.mean(1) if average_attn_weights else scores
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, not hides)
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_weight, out_bias)
    if found is not None and query.dim() == 2:
        found = found.squeeze(0)
    return out if query.dim() == 3 else out.squeeze(1), found


def _fits(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, separate: bool
) -> bool:
    ndim = query.dim()
    same = key.shape[:-1] == value.shape[:-1] if separate else key.shape == value.shape
    return (
        ndim in (2, 3) and key.dim() == value.dim() == ndim and same
        and query.shape[-1] == embed_dim and embed_dim % num_heads == 0
        and (ndim == 2 or query.shape[1] == key.shape[1])
    )


def _masks_fit(
    query: Tensor, key: Tensor, num_heads: int, padding: Tensor | None, mask: Tensor | None,
    is_causal: bool,
) -> bool:
    lengths, batch = (query.shape[0], key.shape[0]), query.shape[1:-1]
    if is_causal and mask is None:
        return False
    if padding is not None and (
        padding.shape != (*batch, lengths[1]) or (mask is not None and mask.dtype != padding.dtype)
    ):
        return False
    kinds = [one.dtype is torch.bool or one.is_floating_point()
             for one in (padding, mask) if one is not None]
    return all(kinds) and (
        mask is None or mask.shape in (lengths, (math.prod(batch) * num_heads, *lengths))
    )


def _mask(
    mask: Tensor | None, padding: Tensor | None, num_heads: int, more: int, dtype: torch.dtype
) -> Tensor | None:
    """What is added to scores of batch, heads, queries and keys; `more` keys are seen by all."""
    mask, padding = (
        None if one is None else _as_added(one, more, dtype) for one in (mask, padding))
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, num_heads))
    if padding is not None:
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
    if mask is None or padding is None:
        return padding if mask is None else mask
    return mask + padding


def _as_added(mask: Tensor, more: int, dtype: torch.dtype) -> Tensor:
    if not mask.is_floating_point():
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    return F.pad(mask, (0, more)) if more else mask


# Attention whose weights are wanted: of sharded queries, rows of weights stay with their queries.
# If heads took over the axes, the mean over heads would be a partial value of all rows.

_WEIGHED = torch.ops.aten._scaled_dot_product_attention_math.default


def _by_rows(call: Call, wants_grad: Any) -> str | None:
    """A mask has lengths of 1 where it is the same for all: "b~ h~ s q!, ..., b~ 1 1 t! -> ..."."""
    if call.get("enable_gqa") or call.get("dropout_p") or call.get("dropout_mask") is not None or (
        len(call.tensors[0].shape) != 4
    ):
        return None
    names, lengths = ("b~", "h~", "s", "t!"), call.results[1].shape
    masks = [
        " ".join([name if length == due else "1" for name, length, due in zip(
            names[-len(mask.shape) :], mask.shape, lengths[-len(mask.shape) :])])
        for mask in call.tensors[3:]
    ]
    return f"{', '.join(['b~ h~ s q!, b~ h~ t! q!, b~ h~ t! e', *masks])} -> b h s e, b h s t"


def _averaged(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result, and the mean of the heads' weights. A query that attends to nothing has NaN, as
    in the module, where the op gives zeros."""
    out, weights = _WEIGHED(q, k, v, mask)
    if mask is None or not k.shape[-2]:
        return out, weights.mean(1)
    attends = weights.detach().sum(-1, keepdim=True) != 0
    factor = torch.where(attends, 1.0, math.nan).to(out.dtype)
    return out * factor, weights.mean(1) * factor.mean(1)


def _of_heads(shards: Shards, *args: Any, **kwargs: Any) -> Any:
    """Samples and heads that the operands shard stay where they are."""
    return _WEIGHED(*args, **kwargs)


PAGE = page(
    op("_scaled_dot_product_attention_math", rule(_by_rows, by_size=True), kernel=_of_heads),
    op("torch.nn.functional.multi_head_attention_forward", compose=_attention),
)
