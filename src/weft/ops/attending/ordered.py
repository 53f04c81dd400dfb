"""Causal attention over tokens that are out of order: a query sees keys of earlier positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.core import Interval
from weft.ops.attending.fused import ATTENTION
from weft.ops.attending.stretches import positions, stretches
from weft.ops.attending.ways import Attention
from weft.rules import OwnRule, TensorArg
from weft.transport import Shards

__all__ = ["RULE", "default_scale", "ordered"]


def ordered(
    query: Tensor, key: Tensor, value: Tensor, order: tuple[Interval, ...], scale: float
) -> Tensor:
    """On whole sequences: in the order of positions, and back."""
    place = positions(stretches((0, query.shape[-2]), order), query.device)
    back = torch.argsort(place)
    given = [one.index_select(-2, back) for one in (query, key, value)]
    out = ATTENTION(*given, is_causal=True, scale=scale, enable_gqa=_is_grouped(query, key))
    return out.index_select(-2, place)


def _is_grouped(query: Tensor | TensorArg, key: Tensor | TensorArg) -> bool:
    return len(query.shape) > 2 and key.shape[-3] not in (1, query.shape[-3])


def _string(query: TensorArg, key: TensorArg, value: TensorArg, *_: Any) -> str:
    """As that of `scaled_dot_product_attention`, which refuses shapes that do not fit."""
    given = [torch.empty(one.shape, device="meta") for one in (query, key, value)]
    ATTENTION(*given, is_causal=True, enable_gqa=_is_grouped(query, key))
    queries, keys = ("... (g r)", "... g") if _is_grouped(query, key) else ("...", "...")
    return f"{queries} s~ q!, {keys} t~s q!, {keys} t~s e -> {queries} s e"


def _over_sequence(
    shards: Shards, query: Tensor, key: Tensor, value: Tensor, order: tuple[Interval, ...],
    scale: float,
) -> Tensor:
    """Queries stay, and see the earlier part of each block; or heads are exchanged."""
    return Attention.of(shards, True, True, order).attend(
        [query, key, value], scale, shards.moved)


RULE = OwnRule("attention in order", _string, linear=((2,),), kernel=_over_sequence)


def default_scale(query: Tensor) -> float:
    """Of the scores."""
    return 1.0 / math.sqrt(max(query.shape[-1], 1))
