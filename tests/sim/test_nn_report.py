"""What a report says of a module: before it is distributed, without ranks, and after."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.oracle import block
from weft import Mesh, P
from weft.errors import ModuleError
from weft.nn import ColwiseParallel, PrepareModuleInput, RowwiseParallel, report

SHARDINGS = {"wte.weight": P("tp"), "mlp.0.*": P("tp"), "*.2": RowwiseParallel("tp"),
             "mlp.0.weight": P()}
PINS = {"mlp": P("dp", "tp"), "mlp.0": PrepareModuleInput(P("dp"))}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))


TEXT = """\
5 parameters and 1 buffers on Mesh(dp=2, tp=2), 4 ranks
name             layout        bytes per rank  pattern
scale            f64[4]                    32  -
wte.weight       f32[7@tp, 4]              64  'wte.weight'
  = head.weight
mlp.0.weight     f32[9@tp, 4]              80  'mlp.0.*'
mlp.0.bias       f32[9@tp]                 20  'mlp.0.*'
mlp.2.weight     f32[4, 9@tp]              80  '*.2'
mlp.2.bias       f32[4]                    16  '*.2'
in all: 240 to 292 bytes on a rank, of 484
outputs of mlp pinned: P('dp', 'tp'), by 'mlp'
inputs of mlp.0 pinned: P('dp'), by 'mlp.0'"""


def test_before_and_after_it_says_the_same() -> None:
    def on_rank(mesh: Any) -> tuple[str, str, int]:
        module = Model()
        before = report(module, mesh, SHARDINGS, PINS)
        weft.distribute_module(module, mesh, shardings=SHARDINGS, activations=PINS)
        after = report(copy.deepcopy(module))
        assert after.rows == before.rows and after.unmatched == ("scale",)
        assert after["head.weight"] is after["wte.weight"]
        held = sum(one.to_local().nbytes for one in [*module.parameters(), *module.buffers()])
        assert held == after.nbytes(mesh.rank)
        return str(before), str(after), held

    ranks = weft.testing.run(on_rank, 4, {"dp": 2, "tp": 2})
    before, after, _ = ranks[0]
    assert before == f"{TEXT}\nearlier patterns took all names of: 'mlp.0.weight'"
    assert after == TEXT
    assert [held for _, _, held in ranks] == [292, 240, 292, 240]


def test_a_plan_needs_no_ranks_and_no_memory() -> None:
    with torch.device("meta"):
        module = nn.Linear(8192, 8192)
    shardings = {"": ColwiseParallel("tp"), "bais": P("tp")}
    made = report(module, Mesh({"dp": 8192, "tp": 8}), shardings, {"x": P()})
    assert made.idle == ("bais", "x")
    assert str(made) == """\
2 parameters and 0 buffers on Mesh(dp=8192, tp=8), 65536 ranks
name    layout              bytes per rank  pattern
weight  f32[8192@tp, 8192]      33,554,432  ''
bias    f32[8192@tp]                 4,096  ''
in all: at most 33,558,528 bytes on a rank, of 268,468,224
matched nothing: 'bais', 'x'"""


def test_a_plain_module_has_no_report() -> None:
    with pytest.raises(ModuleError, match=r"2 of 2 parameters and buffers are plain tensors"):
        report(nn.Linear(2, 3))


def test_a_module_on_several_meshes() -> None:
    def on_rank(mesh: Any) -> str:
        module = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False))
        weft.distribute_module(module[0], mesh, shardings={"weight": P("dp")})
        other = weft.init_mesh({"x": 4})
        weft.distribute_module(module, other, shardings={"1.weight": P(None, "x")})
        return str(report(module))

    assert weft.testing.run(on_rank, 4, {"dp": 2, "tp": 2})[0] == """\
2 parameters and 0 buffers on Mesh(dp=2, tp=2), 4 ranks
name      layout                    bytes per rank  pattern
0.weight  f32[4@dp, 2]                          16  -
1.weight  f32[2, 4@x] on Mesh(x=4)               8  '1.weight'
in all: 64 bytes, on several meshes"""


def test_ragged_blocks_are_counted_as_they_are() -> None:
    mesh = Mesh({"tp": 3})
    sizes = [weft.Shard(0, sizes=(5, 0, 2))]
    made = report(nn.Linear(3, 7), mesh, {"weight": sizes})
    row = made["weight"]
    weight = torch.ones(7, 3)
    assert [row.nbytes(rank) for rank in range(3)] == [
        block(row.layout, weight, (rank,)).nbytes for rank in range(3)]
    assert row.max_nbytes == 60 and made.nbytes(1) == 28
