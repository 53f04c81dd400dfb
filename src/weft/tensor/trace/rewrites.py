"""Functions of torch put otherwise: the same value, of ops that keep apart what may be sharded.

torch's attention of modules folds batch and heads, and positions and batch, into one dim each, of
which no cut of the batch is a block. Written here, they stay dims of their own, so a batch, heads
or query positions that are cut stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["REWRITES"]


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
    """`multi_head_attention_forward`; what it raises or warns of is left to torch's own."""
    weights: Any = (
        [q_proj_weight, k_proj_weight, v_proj_weight] if use_separate_proj_weight
        else [None] * 3 if in_weight is None else in_weight.chunk(3)
    )
    if static_k is not None or static_v is not None or (bias_k is None) is not (bias_v is None) or (
        any(weight is None for weight in weights)
        or not _fits(query, key, value, embed_dim, num_heads, use_separate_proj_weight)
        or not _masks_fit(query, key, num_heads, key_padding_mask, attn_mask, is_causal)
    ):
        return F.multi_head_attention_forward(
            query, key, value, embed_dim, num_heads, in_weight, in_bias, bias_k, bias_v,
            add_zero_attn, dropout_p, out_weight, out_bias, training, key_padding_mask,
            need_weights, attn_mask, use_separate_proj_weight, q_proj_weight, k_proj_weight,
            v_proj_weight, static_k, static_v, average_attn_weights, is_causal,
        )
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
    scores = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        scores = (scores if mask is None else scores + mask).softmax(-1)
        out = (F.dropout(scores, dropout_p) if dropout_p > 0.0 else scores) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, not hides)
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_weight, out_bias)
    if scores is not None:
        scores = scores.mean(1) if average_attn_weights else scores
        scores = scores if query.dim() == 3 else scores.squeeze(0)
    return out if query.dim() == 3 else out.squeeze(1), scores


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
    found = [
        None if one is None else F.pad(_as_added(one, dtype), (0, more)) if more
        else _as_added(one, dtype) for one in (mask, padding)
    ]
    mask, padding = found
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, num_heads))
    if padding is not None:
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
    if mask is None or padding is None:
        return padding if mask is None else mask
    return mask + padding


def _as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _fractional(function: Any, count: int) -> Callable[..., Any]:
    """`fractional_max_pool`: the numbers that it draws are of the tensor's own kind."""

    def run(
        input: Tensor, kernel_size: Any, output_size: Any = None, output_ratio: Any = None,
        return_indices: bool = False, _random_samples: Tensor | None = None,
    ) -> Any:
        if _random_samples is None and input.dim() > count:
            lead = (1, *input.shape[:-count])[-2:]
            _random_samples = input.new_empty((*lead, count)).uniform_()
        out = function(
            input, kernel_size, output_size, output_ratio, _random_samples=_random_samples
        )
        return out if return_indices else out[0]

    return run


def _with_indices(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(*args, **{**kwargs, "return_indices": True})


_POOLS = {
    F.fractional_max_pool2d: _fractional(F.fractional_max_pool2d_with_indices, 2),
    F.fractional_max_pool3d: _fractional(F.fractional_max_pool3d_with_indices, 3),
}

def _unravel_index(indices: Tensor, shape: Any) -> tuple[Tensor, ...]:
    """`unravel_index` by numbers, where torch makes tensors of the lengths."""
    lengths = [shape] if isinstance(shape, int) else list(shape)
    usual = indices.dtype not in (torch.bool, torch.uint64) and not (
        indices.is_floating_point() or indices.is_complex()
    )
    if not usual or not all(type(length) is int and length > 0 for length in lengths):
        return torch.unravel_index(indices, shape)
    found, step = [], 1
    for length in reversed(lengths):
        found.append(indices.long().floor_divide(step) % length)
        step *= length
    return tuple(reversed(found))


def _fill_diagonal(x: Any, fill_value: Any, wrap: bool = False) -> Any:
    """By a mask of the diagonal, which lies as x does; but of more dims as torch, and of numbers
    that x's dtype would have to round."""
    usual = type(fill_value) in (bool, int) or (
        type(fill_value) is float and (x.is_floating_point() or x.is_complex())
    )
    if x.dim() != 2 or wrap or not usual or x.dtype == torch.bool:
        return x.fill_diagonal_(fill_value, wrap)
    return x.masked_fill_(torch.ones_like(x, dtype=torch.bool).tril().triu(), fill_value)


def _linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, options: Any = None, **more: Any
) -> Tensor:
    """Without chunks: logits are sharded as the operands are. What torch warns of is left to it."""
    usual = linear_weight.dim() == 2 and target.dtype is torch.int64 and (
        more.get("reduction", "mean") in ("mean", "sum", "none")
    ) and not more.get("label_smoothing")
    return F.linear_cross_entropy(
        input, linear_weight, target, options=None if usual else options, **more)


REWRITES: dict[Any, Any] = {
    F.linear_cross_entropy: _linear_cross_entropy,
    torch.Tensor.fill_diagonal_: _fill_diagonal,
    F.multi_head_attention_forward: _attention,
    torch.unravel_index: _unravel_index,
    **_POOLS,
    F.fractional_max_pool2d_with_indices: _with_indices(_POOLS[F.fractional_max_pool2d]),
    F.fractional_max_pool3d_with_indices: _with_indices(_POOLS[F.fractional_max_pool3d]),
}
"""Function -> what is captured in its stead."""
