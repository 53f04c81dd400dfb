"""Regions over processes: as on simulated ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import weft
from tests.gloo import GlooWorld
from weft import P, collectives, local_map

MESH = {"dp": 2, "tp": 2}


def attended(mesh: Any) -> list[Tensor]:
    """A ring over ragged blocks of rows, a gather, an exchange, and their gradients."""
    x = torch.arange(35.0, dtype=torch.float64).view(7, 5).sin()
    x = weft.distribute_tensor(x, mesh, P("tp"), src_data_rank=None).requires_grad_()
    w = torch.ones(5, dtype=torch.float64).requires_grad_()

    @local_map(in_specs=(P(("tp", "dp")), P()), out_specs=(P(("tp", "dp")), P(), P(None, "tp")))
    def inside(block: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, moving = torch.zeros_like(block), block * w
        for _ in range(collectives.axis_size("tp")):
            out = out + block * collectives.psum(moving.sum(), "dp")
            moving = collectives.ppermute(moving, "tp", [(0, 1), (1, 0)])
        rows = collectives.all_gather(out, ("tp", "dp"))
        turned = collectives.all_to_all(out, "tp", 1, 0)
        return out, rows.sum() * w.sum(), collectives.all_gather(turned, "dp")

    outs = inside(x, w)
    sum((out * out).sum() for out in outs).backward()  # type: ignore[union-attr]
    return [one.detach().full_tensor() for one in (*outs, x.grad)] + [w.grad]


def on_rank(mesh: Any) -> list[Tensor]:
    return attended(mesh)


def test_as_on_simulated_ranks(gloo: GlooWorld) -> None:
    expected = weft.testing.run(attended, mesh=MESH)
    for mine, due in zip(gloo.run(on_rank, MESH), expected):
        torch.testing.assert_close(mine, due)
