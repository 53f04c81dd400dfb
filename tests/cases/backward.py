"""Backwards that ranks must carry out in step, for simulated ranks and gloo alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import weft
from weft import Layout, P

TABLE = torch.linspace(0.1, 2.0, 24, dtype=torch.float64).view(4, 6)
PICKED = torch.tensor([0, 1, 2, 3, 3, 1])


def ragged_checkpoint(mesh: Any, reentrant: bool) -> tuple[Tensor, list[str]]:
    """The gradient of a table, and what was communicated, in order; plain where mesh is None.

    All rows lie on the first rank. The last op of the checkpoint saves nothing where the shard is
    empty, and its operand has just been communicated.
    """
    table, picked, rows = TABLE.clone(), PICKED, None
    if mesh is not None:
        sizes = (4, *[0] * (mesh.size() - 1))
        rows = Layout(mesh, (4, 6), P(mesh.axis_names), sizes={0: sizes})
        table = weft.distribute_tensor(table, mesh, rows, src_data_rank=None)
        picked = weft.distribute_tensor(picked, mesh, P())
    table.requires_grad_()

    def part(table: Any) -> Tensor:
        if rows is None:
            return F.embedding(picked, (table * table).exp())
        columns = (table * table).redistribute(placements=P(None, mesh.axis_names)).exp()
        return F.embedding(picked, columns.redistribute(placements=rows))

    with weft.explain() as log:
        checkpoint(part, table, use_reentrant=reentrant).sum().backward()
    assert table.grad is not None
    return full(table.grad), [f"{event.direction} {event.transition}" for event in log.events]


def terms(mesh: Any) -> list[Tensor]:
    """Gradients of leaves used over one axis, over another, over none, with hooks and without."""
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
    w, b = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3), TABLE[0, :3].clone()
    y = x
    if mesh is not None:
        x, y = (weft.distribute_tensor(x, mesh, P(axis)) for axis in ("dp", "tp"))
        w, b = (weft.distribute_tensor(one, mesh, P()) for one in (w, b))
    w.requires_grad_()
    b.requires_grad_()
    found: list[Tensor] = []
    for step in range(3):
        loss = ((x @ w + b).tanh() * (step + 1)).sum() + (y @ w).exp().mean() + (b * b).sum()
        if step == 1:
            handle = w.register_hook(lambda gradient: gradient.clamp(-1, 1))
        loss.backward()
        if step == 1:
            handle.remove()
        found += [full(w.grad.clone()), full(b.grad.clone())]  # type: ignore[union-attr]
    return found


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, weft.ShardTensor) else tensor
