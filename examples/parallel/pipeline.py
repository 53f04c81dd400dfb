"""Pipeline: two stages on two meshes, by torch's schedules; each stage is tensor parallel.

A stage takes what it receives as replicated, and sends its output whole. The scores have the
weights of the token embedding: both stages hold them, and add up their gradients in each step.

    weft run -n 4 examples/parallel/pipeline.py
    torchrun --nproc-per-node 4 examples/parallel/pipeline.py zero
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)

import plain
import weft
from tensor_parallel import TABLE

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B,
    "zero": lambda stage, *args, **kwargs: ScheduleInterleavedZeroBubble([stage], *args, **kwargs),
}


class model(plain.Transformer):
    """The scores' weights are those of the token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.token.weight


class First(nn.Module):
    """The first half of a Transformer."""

    def __init__(self, model: plain.Transformer) -> None:
        super().__init__()
        self.token, self.place, self.blocks = model.token, model.place, model.blocks[:1]

    def forward(self, ids: Tensor) -> Tensor:
        return self.blocks(self.token(ids) + self.place)


def last(model: plain.Transformer) -> nn.Module:
    return nn.Sequential(model.blocks[1:], model.norm, model.head)


def sharded(num_ranks: int, schedule: str = "gpipe") -> list[float]:
    mesh = weft.init_mesh({"pp": 2, "tp": num_ranks // 2})
    number = mesh.get_local_rank("pp")
    part: Any = weft.distribute_module(
        (First, last)[number](plain.make(model)), mesh["tp"],
        shardings={name.replace("blocks.", ""): spec for name, spec in TABLE.items()
                   if name.startswith("blocks.")})
    tied = (part.token if number == 0 else part[-1]).weight
    stage = PipelineStage(part, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    run = SCHEDULES[schedule](stage, n_microbatches=4, loss_fn=plain.loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    means = torch.zeros(plain.NUM_STEPS)
    for step, (ids, targets) in enumerate(plain.batches()):
        losses: list[Tensor] = []  # of the microbatches, on the last stage
        optimizer.zero_grad()
        run.step(*[ids][number:], target=targets, losses=losses)
        distributed.all_reduce(tied.grad.to_local(), group=mesh.get_group("pp"))
        optimizer.step()
        means[step] = sum(losses) / 4
    distributed.broadcast(means, num_ranks - 1)
    return means.tolist()


if __name__ == "__main__":
    plain.beside(sharded(plain.num_ranks(), *sys.argv[1:]), plain.alone(model))
