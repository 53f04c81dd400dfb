"""A decoder-only transformer: an ordinary module that knows nothing of meshes or ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Settings", "Transformer"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the model."""

    vocabulary: int = 257
    context: int = 96
    num_blocks: int = 4
    num_heads: int = 5
    head_width: int = 16
    hidden: int = 213

    @property
    def width(self) -> int:
        return self.num_heads * self.head_width


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.num_heads = settings.num_heads
        width = settings.width
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a layer norm and beside a residual."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(settings.width)
        self.attention = Attention(settings)
        self.norm_2 = nn.LayerNorm(settings.width)
        self.up = nn.Linear(settings.width, settings.hidden)
        self.down = nn.Linear(settings.hidden, settings.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """Embeddings, blocks, a last norm, and a head of its own weights.

    Radford et al., 2019 (GPT-2), with an untied head and no dropout.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.token = nn.Embedding(settings.vocabulary, settings.width)
        self.position = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.num_blocks))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, settings.vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of `targets` (batch, time) given `tokens` (batch, time)."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
