"""One training loop, for one process and for many ranks alike; how far their losses are apart."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import weft
from demo.model import Settings, Transformer
from demo.text import Corpus
from weft import P, Replicate, Shard

__all__ = ["MESH", "NUM_RANKS", "TOLERANCE", "Run", "Step", "differences", "distributed", "plain",
           "shardings"]

MESH = {"dp": 2, "tp": 2}
NUM_RANKS = math.prod(MESH.values())

TOLERANCE = 1e-4
"""How far two float32 losses of a step may be apart, as a part of the loss."""


@dataclass(frozen=True, slots=True)
class Run:
    """What is trained: model, batches, optimizer."""

    settings: Settings = field(default_factory=Settings)
    num_steps: int = 100
    batch: int = 15
    learning_rate: float = 3e-3
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Of one step."""
        return self.batch * self.settings.context

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Run:
        return cls(**{**values, "settings": Settings(**values["settings"])})


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was made."""

    loss: float
    seconds: float


def differences(ranks: Sequence[Step], single: Sequence[Step]) -> list[float]:
    """Per step, the difference relative to the single process; infinite where one is no number.

    Empty when there was no single process.
    """
    apart = [abs(one.loss - other.loss) / abs(other.loss) for one, other in zip(ranks, single)]
    return [each if math.isfinite(each) else math.inf for each in apart]


def shardings(settings: Settings) -> dict[str, Any]:
    """Which parameters the axis tp cuts, and where; all others are replicated.

    Attention is sharded between heads, so that every rank holds whole heads; linears in pairs, the
    first by its rows (outputs) and the second by its columns (inputs), as Megatron-LM does
    (Shoeybi et al., 2019); embedding and head by the vocabulary.
    """
    first = -(-settings.num_heads // 2) * settings.head_width
    heads = (first, settings.width - first)
    return {
        "token.weight": P("tp"),
        "blocks.*.attention.out.weight": [Replicate(), Shard(1, sizes=heads)],
        "blocks.*.attention.*.weight": [Replicate(), Shard(0, sizes=heads)],
        "blocks.*.up.*": P("tp"),
        "blocks.*.down.weight": P(None, "tp"),
        "head.weight": P("tp"),
    }


Training = tuple[Transformer, Iterator[Step]]
"""A model, and the steps that train it, made as they are asked for."""


def plain(run: Run, corpus: Corpus) -> Training:
    """One process and plain tensors."""
    model = _model(run)
    return model, _steps(run, corpus, model, lambda batch: batch)


def distributed(run: Run, corpus: Corpus, mesh: Any) -> Training:
    """A rank of the mesh: parameters by `shardings`, the batch sharded over dp."""
    model = _model(run)
    weft.distribute_module(model, mesh, shardings=shardings(run.settings))
    return model, _steps(
        run, corpus, model, lambda batch: weft.distribute_tensor(batch, mesh, P("dp"))
    )


def _model(run: Run) -> Transformer:
    torch.manual_seed(run.seed)
    return Transformer(run.settings)


def _steps(
    run: Run, corpus: Corpus, model: Transformer, place: Callable[[Tensor], Tensor]
) -> Iterator[Step]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate)
    for step in range(run.num_steps):
        tokens, targets = corpus.batch(step, run.batch, run.settings.context)
        start = time.perf_counter()
        loss = model(place(tokens), place(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield Step(loss.item(), time.perf_counter() - start)
