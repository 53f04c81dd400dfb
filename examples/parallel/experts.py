"""Experts: each rank has some of the experts of every layer, and a part of the batch.

Rows go to the rank of their expert, and what it makes of them comes back. `by_expert` sends them
there at once; without it they would first be laid out evenly.

    weft run -n 4 examples/parallel/experts.py
    torchrun --nproc-per-node 4 examples/parallel/experts.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plain
import weft
from weft import P


class Experts(nn.Module):
    """Each row goes to the expert that the router likes best."""

    def __init__(self, width: int = 32, hidden: int = 64, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weight, expert = self.router(rows).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = expert.bincount(minlength=len(self.up)).cumsum(0).int()
        to = weft.nn.by_expert(order, ends, self.up)  # of plain tensors: `order` itself
        hidden = F.gelu(F.grouped_mm(rows[to], self.up, offs=ends))
        made = F.grouped_mm(hidden, self.down, offs=ends)
        return x + (made[order.argsort()] * weight[:, None]).view_as(x)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(plain.VOCABULARY, 32), Experts(), Experts(), nn.Linear(32, plain.VOCABULARY))


def sharded(num_ranks: int) -> list[float]:
    mesh = weft.init_mesh({"ep": num_ranks})
    made = weft.distribute_module(  # gather=False: experts stay where they are
        plain.make(model), mesh, shardings={"*.up": P("ep"), "*.down": P("ep")}, gather=False)
    return plain.train(made, lambda ids: weft.distribute_tensor(ids, mesh, P("ep")))


if __name__ == "__main__":
    plain.beside(sharded(plain.num_ranks()), plain.alone(model))
