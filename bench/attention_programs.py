"""What `weft bench attention` measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["PROGRAMS", "SYSTEMS", "WIDTH", "Program"]

WIDTH = 64

SYSTEMS = ("one process", "weft", "zig-zag", "keys gathered", "DTensor")

_attention: Any = F.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Program:
    """Attention of so many heads of queries, and of keys."""

    heads: int
    key_heads: int
    is_causal: bool

    def operands(self, length: int) -> list[Tensor]:
        """Queries, keys and values: the same everywhere."""
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(1, heads, length, WIDTH, generator=generator)
                for heads in (self.heads, self.key_heads, self.key_heads)]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of whole or sharded sequences."""
        return _attention(query, key, value, is_causal=self.is_causal,
                          enable_gqa=self.heads != self.key_heads)


PROGRAMS = {
    "1 head": Program(1, 1, False),
    "1 head, causal": Program(1, 1, True),
    "4 heads": Program(4, 4, False),
    "4 heads, causal": Program(4, 4, True),
    "8 on 2 heads, causal": Program(8, 2, True),
}
