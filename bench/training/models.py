"""A stack of blocks and a small Llama, which know of no mesh; what a step of them is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["MODELS", "Model", "Shape"]

HEAD_WIDTH = 16
VOCABULARY = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model, and of one rank's part of the batch."""

    layers: int = 4
    width: int = 128
    batch: int = 4
    length: int = 128
    checkpoints: bool = False


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (_heads(one(h)) for one in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _LlamaBlock(nn.Module):
    """Rotary positions, half as many heads of keys and values, gated hidden units."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        cosine, sine = _rotations(h.shape[1])
        q, k, v = (_heads(one(h)) for one in (self.q, self.k, self.v))
        q, k = (one * cosine + _turned(one) * sine for one in (q, k))
        k, v = (one.repeat_interleave(2, 1) for one in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotations(length: int) -> tuple[Tensor, Tensor]:
    rates = 10_000.0 ** -(torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
    angles = torch.outer(torch.arange(length), rates).repeat(1, 2)
    return angles.cos(), angles.sin()


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class _Layers(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module], shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block(shape.width) for _ in range(shape.layers))
        self.checkpoints = shape.checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x


class Stack(_Layers):
    """Blocks alone: activations in, activations out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(_Block, shape)


class Llama(nn.Module):
    """Token ids in, scores of the next tokens out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.body = _Layers(_LlamaBlock, shape)
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.token(ids))))


@dataclass(frozen=True, slots=True)
class Model:
    """A model, its whole batch of `rows` rows, and its loss."""

    make: Callable[[Shape], Any]
    given: Callable[[Shape, int], Tensor]
    loss: Callable[[Tensor, Any], Tensor]
    head_width: int = HEAD_WIDTH
    """Features for each head of keys."""


def _activations(shape: Shape, rows: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, shape.length, shape.width)


def _ids(shape: Shape, rows: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(VOCABULARY, (rows, shape.length))


MODELS = {
    "blocks": Model(Stack, _activations, lambda out, given: F.mse_loss(out, given)),
    "Llama": Model(
        Llama, _ids, lambda out, ids: F.cross_entropy(out.flatten(0, 1), ids.flatten()),
        2 * HEAD_WIDTH),
}
