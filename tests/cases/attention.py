"""Scaled dot-product attention: causal, masked, grouped heads, batch and heads sharded."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.cases import Case, Operand, bools, case, reals

sdpa = F.scaled_dot_product_attention


def _heads(batch: int = 2, heads: int = 5, length: int = 4, width: int = 3,
           dtype: torch.dtype = torch.float64) -> Operand:
    return reals(batch, heads, length, width, dtype=dtype)


def _by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    length = q.size(-2)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return F.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v


def _block(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Self-attention of 5 heads over width 10."""
    q, k, v = F.linear(x, qkv).unflatten(-1, (3, 5, 2)).unbind(-3)
    mixed = sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    return F.linear(mixed.transpose(1, 2).flatten(-2), out)


_THREE = (_heads(), _heads(), _heads())
_ALIKE = ("r", "s0", "s1", "s1!", "s0?", "s1%", "s0.d+s1.t", "s1.dt", "s0.d+p.t", "p", "s2",
          "s0.d+s1.t!", "s1.d+s0.t", "s0.td", "plain")

_SEQUENCE = (("s2", "s2!", "s2?", "s2%", "s2.dt", "s2.td!", "s0.d+s2.t", "s1.d+s2.t", "s1.d+s2.t!",
              "s2.d", "r"),) * 3

CASES: list[Case] = [
    case("sdpa_sequence", sdpa, *_THREE, layouts=_SEQUENCE, per_mesh=12),
    case("sdpa_sequence_causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), *_THREE,
         layouts=_SEQUENCE, per_mesh=12),
    case("sdpa_sequence_by_heads", lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True),
         _heads(heads=6), _heads(heads=3), _heads(heads=3), layouts=_SEQUENCE, per_mesh=12),
    case("sdpa_sequence_masked", lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), *_THREE,
         bools(2, 1, 4, 4), layouts=(*_SEQUENCE, None), per_mesh=12),
    case("sdpa", sdpa, *_THREE, per_mesh=16),
    case("sdpa_causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), *_THREE,
         layouts=(_ALIKE, _ALIKE, _ALIKE), per_mesh=16),
    case("sdpa_same_tensor", lambda x: sdpa(x, x, x, is_causal=True), _heads(), per_mesh=12),
    case("sdpa_scale", lambda q, k, v: sdpa(q, k, v, scale=0.3), *_THREE),
    case("sdpa_float32", lambda q, k, v: sdpa(q, k, v, is_causal=True),
         *(_heads(dtype=torch.float32),) * 3),
    case("sdpa_cross", sdpa, _heads(length=3), _heads(length=6), _heads(length=6)),
    case("sdpa_causal_cross", lambda q, k, v: sdpa(q, k, v, is_causal=True), _heads(length=3),
         _heads(length=6), _heads(length=6)),
    case("sdpa_other_width", sdpa, _heads(), _heads(), _heads(width=2)),
    case("sdpa_bool_mask", lambda q, k, v, m: sdpa(q, k, v, attn_mask=m | torch.eye(4).bool()),
         *_THREE, bools(4, 4)),
    case("sdpa_float_mask", lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), *_THREE,
         reals(2, 1, 4, 4, fixed=True)),
    case("sdpa_mask_per_head", lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), *_THREE,
         reals(5, 4, 4, fixed=True)),
    case("sdpa_mask_gradient", lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), *_THREE,
         reals(2, 5, 4, 4)),
    case("sdpa_grouped", lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True),
         _heads(heads=6), _heads(heads=3), _heads(heads=3), per_mesh=12),
    case("sdpa_one_key_head", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), _heads(heads=4),
         _heads(heads=1), _heads(heads=1)),
    case("sdpa_three_dims", sdpa, *(reals(5, 4, 3),) * 3),
    case("attention_by_hand", _by_hand, *_THREE),
    case("attention_block", _block, reals(3, 4, 10), reals(30, 10), reals(10, 10), per_mesh=16),
]
