"""Tensors drawn: ShardTensors without communication, and torch's own DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Shard

import weft
from weft import Layout, Mesh, P
from weft.transport import traffic


def test_a_shard_tensor_is_drawn_alike_on_every_rank():
    def draw(mesh: Any) -> tuple[str, str, int]:
        x = weft.ones(5, 6, mesh=mesh, spec=P("dp", "tp"), dtype=torch.bfloat16)
        partial = x.sum(0)
        with traffic.record() as log:
            drawn = weft.show(x), weft.show(partial)
        return str(drawn[0]), str(drawn[1]), len(log.events)

    found = weft.testing.run(draw, 4, {"dp": 2, "tp": 2})
    mesh = Mesh({"dp": 2, "tp": 2})
    full = weft.show(Layout(mesh, (5, 6), P("dp", "tp")), dtype="bfloat16")
    terms = weft.show(Layout(mesh, (6,), P("tp", partial={"dp": "sum"})), dtype="bfloat16")
    assert found == [(str(full), str(terms), 0)] * 4
    assert full.startswith("bf16[5@dp, 6@tp] on Mesh(dp=2, tp=2): 4 ranks\n")


def test_a_dtensor_is_drawn_as_its_layout():
    class Stands:  # what a DTensor offers; one needs a process group
        device_mesh = Mesh({"dp": 2, "tp": 2})
        placements = (Shard(0), Partial("sum"))
        shape = torch.Size([5, 6])
        dtype = torch.float32
        layout = torch.strided

    layout = Layout(Mesh({"dp": 2, "tp": 2}), (5, 6), P("dp", partial={"tp": "sum"}))
    assert weft.show(Stands()) == weft.show(layout, dtype="float32")


def test_a_plain_tensor_is_refused():
    with pytest.raises(weft.ShardTypeError, match="an object of type Tensor has no layout"):
        weft.show(torch.ones(3))
