"""Random models, tables of shardings and ways to train, each known by a seed.

A `Trial` says all that is drawn, in plain values, so that one process and all ranks build the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import weft
from weft import P

__all__ = ["VOCABULARY", "Model", "Trial", "drawn", "specs_of"]

VOCABULARY = 13
_MESHES: list[dict[str, int]] = [
    {"dp": 2}, {"dp": 3}, {"dp": 4}, {"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"dp": 1, "tp": 2}]
_KINDS = ("mlp", "attention", "loop", "grouped", "conv", "gated", "unused")


@dataclass(frozen=True)
class Trial:
    """All that is drawn for a seed. `width`, `heads`: of all blocks; `kinds`: one a block."""

    seed: int
    mesh: dict[str, int]
    width: int
    heads: int
    kinds: tuple[str, ...]
    tied: bool
    frozen: tuple[str, ...]
    lora: str
    batch: tuple[int, int]
    spec: str
    gather: str
    optimizer: str
    num_steps: int
    num_batches: int
    accumulate: bool
    clip: bool
    checkpoint: str
    autocast: str
    density: float


def drawn(seed: int) -> Trial:
    draw = random.Random(seed)
    heads = draw.choice([1, 2, 3])
    num_batches = draw.choice([1, 1, 2, 3])
    return Trial(
        seed=seed, mesh=draw.choice(_MESHES), width=heads * draw.choice([2, 4]), heads=heads,
        kinds=tuple(draw.choices(_KINDS, k=draw.randint(1, 3))), tied=draw.random() < 0.3,
        frozen=tuple(draw.sample(["token", "layers.0", "norm", "head"], draw.choice([0, 0, 1, 2]))),
        lora=draw.choice(["", "", "", "plain", "sharded"]),
        batch=(draw.choice([1, 2, 3, 4, 6]), draw.choice([1, 3, 5])),
        spec=draw.choice(["dp", "dp", "dp", "none", "both", "tokens"]),
        gather=draw.choice(["auto", "auto", "none", "kept", "layers"]),
        optimizer=draw.choice(["sgd", "adamw", "adamw foreach", "adamw fused", "rmsprop"]),
        num_steps=draw.choice([2, 3]), num_batches=num_batches,
        accumulate=num_batches > 1 and draw.random() < 0.6, clip=draw.random() < 0.4,
        checkpoint=draw.choice(["", "", "reentrant", "other"]),
        autocast=draw.choice(["", "", "off"]), density=draw.choice([0.0, 0.3, 0.7, 1.0]))


def specs_of(trial: Trial, model: nn.Module) -> dict[str, Any]:
    """A table: for some of the parameters axes for some of their dims."""
    draw = random.Random(trial.seed + 1)
    table: dict[str, Any] = {}
    for name, param in model.named_parameters():
        if draw.random() >= trial.density or not param.dim():
            continue
        axes = draw.sample([*trial.mesh], draw.randint(1, len(trial.mesh)))
        entries: list[Any] = [None] * param.dim()
        if draw.random() < 0.5:
            entries[draw.randrange(param.dim())] = tuple(axes)
        else:
            for axis in axes:
                at = draw.randrange(param.dim())
                entries[at] = (*(entries[at] or ()), axis)
        table[name] = P(*entries)
    return table


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


class Block(nn.Module):
    """A norm, one of the kinds, and what was there before."""

    def __init__(self, kind: str, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        makers: dict[str, Any] = {
            "mlp": _Mlp, "loop": _Loop, "grouped": _Grouped, "conv": _Conv, "gated": _Gated,
            "unused": _Unused}
        self.body = _Attention(width, heads) if kind == "attention" else makers[kind](width)

    def forward(self, x: Any) -> Any:
        return x + self.body(self.norm(x))


class Model(nn.Module):
    """Ids (batch, length) to scores (batch, length, vocabulary)."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        torch.manual_seed(trial.seed)
        self.checkpoint = trial.checkpoint
        self.token = nn.Embedding(VOCABULARY, trial.width)
        self.place = nn.Parameter(torch.randn(8, trial.width) / 4)
        self.layers = nn.ModuleList(
            Block(kind, trial.width, trial.heads) for kind in trial.kinds)
        self.norm = nn.LayerNorm(trial.width)
        self.head = nn.Linear(trial.width, VOCABULARY, bias=not trial.tied)
        if trial.tied:
            self.head.weight = self.token.weight
        self.double()
        for name, param in self.named_parameters():
            param.requires_grad_(not name.startswith(trial.frozen) if trial.frozen else True)

    def forward(self, ids: Any) -> Any:
        x = self.token(ids) + self.place[: ids.shape[1]]
        for layer in self.layers:
            if self.checkpoint and x.requires_grad:
                x = torch.utils.checkpoint.checkpoint(
                    layer, x, use_reentrant=self.checkpoint == "reentrant")
            else:
                x = layer(x)
        return self.head(self.norm(x))


class Lora(nn.Module):
    """A linear layer and two small matrices beside it, as they are put in later."""

    def __init__(self, base: nn.Module, num_in: int, num_out: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, num_in, dtype=torch.float64) / 4)
        self.up = nn.Parameter(torch.randn(num_out, 2, dtype=torch.float64) / 4)

    def forward(self, x: Any) -> Any:
        return self.base(x) + x @ self.down.T @ self.up.T
