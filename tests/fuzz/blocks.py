"""The blocks of drawn models: from (batch, length, width) to the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import weft
from tests.fuzz import layers

__all__ = ["KINDS", "Block"]


class _Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(x)))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)

    def forward(self, x: Any) -> Any:
        parts = [one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                 for one in self.mix(x).chunk(3, -1)]
        with sdpa_kernel(SDPBackend.MATH):  # the only one with a second derivative
            mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class _Loop(nn.Module):
    """Experts one after the other; some have no rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 5)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(5))

    def forward(self, x: Any) -> Any:
        rows = x.flatten(0, -2)
        weight, choice = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for at, expert in enumerate(self.experts):
            index = (choice == at).nonzero().squeeze(1)
            out.index_add_(0, index, expert(rows[index]) * weight[index, None])
        return out.view_as(x)


class _Grouped(nn.Module):
    """Experts by one product of sorted rows, in float32: torch has no other for float64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.up = nn.Parameter(torch.randn(3, width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(3, 2 * width, width) / 4)

    def forward(self, x: Any) -> Any:
        rows = x.flatten(0, -2)
        weight, expert = self.router(rows).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = expert.bincount(minlength=3).cumsum(0).int()
        to = weft.nn.by_expert(order, ends, self.up)
        pad = 16 - rows.shape[-1] % 16  # lines of 16 bytes
        given = F.pad(rows[to].float(), (0, pad))
        up, down = (one.float() for one in (F.pad(self.up, (0, 0, 0, pad)), self.down))
        wide = F.pad(up, (0, 16 - up.shape[-1] % 16))
        hidden = F.gelu(F.grouped_mm(given, wide, offs=ends))
        down = F.pad(down, (0, pad, 0, wide.shape[-1] - down.shape[1]))
        made = F.grouped_mm(hidden, down, offs=ends)[:, : rows.shape[-1]].to(x.dtype)
        return (made[order.argsort()] * weight[:, None]).view_as(x)


class _Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class _Gated(nn.Module):
    """One of two branches, by what the data are: the other one has no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return self.one(x) if bool(x[..., 0].sum() > 0) else self.other(x).tanh()


class _Unused(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.never, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        return x * self.scale


KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    "mlp": lambda width, _: _Mlp(width), "attention": _Attention,
    "loop": lambda width, _: _Loop(width), "grouped": lambda width, _: _Grouped(width),
    "conv": lambda width, _: _Conv(width), "gated": lambda width, _: _Gated(width),
    "unused": lambda width, _: _Unused(width),
    **{name: lambda width, _, of=of: of(width) for name, of in layers.KINDS.items()},
}
"""Name -> what makes one of a width and a number of heads."""


class Block(nn.Module):
    """A norm, one of the kinds, and what was there before."""

    def __init__(self, kind: str, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.body = KINDS[kind](width, heads)

    def forward(self, x: Any) -> Any:
        return x + self.body(self.norm(x))
