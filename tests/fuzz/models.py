"""The model of a trial, and what users put into it later."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.fuzz.blocks import Block
from tests.fuzz.draws import Trial

__all__ = ["VOCABULARY", "Lora", "Model", "dtype_of", "freeze"]

VOCABULARY = 13


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
        if trial.shared:
            self.layers.append(Block("mlp", trial.width, trial.heads))
            self.layers[-1].body = self.layers[0].body
        self.to(dtype_of(trial))
        freeze(self, trial.frozen)

    def forward(self, ids: Any) -> Any:
        x = self.token(ids) + self.place[: ids.shape[1]]
        for layer in self.layers:
            x = self._checkpointed(layer, x) if self.checkpoint and x.requires_grad else layer(x)
        return self.head(self.norm(x))

    def _checkpointed(self, layer: Any, x: Any) -> Any:
        if self.checkpoint == "selective":
            return checkpoint(layer, x, use_reentrant=False, context_fn=_kept)
        return checkpoint(layer, x, use_reentrant=self.checkpoint == "reentrant")


def dtype_of(trial: Trial) -> torch.dtype:
    """Of parameters: autocast leaves float64 as it is."""
    return torch.float32 if trial.precision == "autocast" else torch.float64


def _kept() -> Any:
    """Products of matrices are kept, the rest is computed again."""
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def freeze(model: nn.Module, names: tuple[str, ...]) -> None:
    """Only parameters whose names begin otherwise learn."""
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(names) if names else True)


class Lora(nn.Module):
    """A linear layer and two small matrices beside it, as they are put in later."""

    def __init__(self, base: nn.Module, num_in: int, num_out: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        dtype = next(base.parameters()).dtype
        self.down = nn.Parameter(torch.randn(2, num_in, dtype=dtype) / 4)
        self.up = nn.Parameter(torch.randn(num_out, 2, dtype=dtype) / 4)

    def forward(self, x: Any) -> Any:
        return self.base(x) + x @ self.down.T @ self.up.T
