"""An ordinary model and its training, which know of no mesh; the examples beside it shard them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, CONTEXT, BATCH, NUM_STEPS = 32, 16, 8, 4

TOLERANCE = 1e-5
"""How far two float32 losses of a step may be apart, as a part of the loss."""


class Block(nn.Module):
    """Attention to earlier tokens, then a layer of hidden units, each added to what was there."""

    def __init__(self, width: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm1(x)
        heads = [one(given).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
                 for one in (self.q, self.k, self.v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Token ids (batch, length) to scores (batch, length, vocabulary)."""

    def __init__(self, width: int = 32, num_blocks: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(ids) + self.place)))


def make(kind: Callable[[], Any] = Transformer) -> Any:
    """A model with the same first values in every process."""
    torch.manual_seed(0)
    return kind()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Synthetic texts, each a walk with steps of 1 to 3, and what follows each token."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        steps = torch.randint(1, 4, (BATCH, CONTEXT + 1), generator=draw)
        text = steps.cumsum(1) % VOCABULARY
        yield text[:, :-1], text[:, 1:]


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    model: nn.Module, place: Callable[[Tensor], Tensor] = lambda ids: ids,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> list[float]:
    """Train on each batch, where `place` puts it; the loss of every step."""
    optimizer = optimizer_of(model)
    losses = []
    for ids, targets in batches():
        loss = loss_of(model(place(ids)), place(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(kind: Callable[[], Any] = Transformer, **how: Any) -> list[float]:
    """The losses of one process."""
    return train(make(kind), **how)


def apart(losses: list[float], due: list[float]) -> float:
    """The largest difference of two losses of a step, as a part of the loss."""
    return max(abs(one - other) / other for one, other in zip(losses, due, strict=True))


def beside(losses: list[float], due: list[float]) -> None:
    """Print both losses of every step; the program fails where they differ."""
    if os.environ.get("RANK", "0") == "0":
        for step, (one, other) in enumerate(zip(losses, due, strict=True)):
            print(f"step {step}  loss {one:.6f}  one process {other:.6f}")
        print(f"apart {apart(losses, due):.1e} of the loss; {TOLERANCE:.0e} is allowed")
    if apart(losses, due) > TOLERANCE:
        sys.exit(1)


def num_ranks() -> int:
    """How many processes `weft run` or torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))
