"""A module over processes: laid out on the meta device, made, pinned, trained, saved and loaded, as
on simulated ranks."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.gloo import GlooWorld
from weft import P
from weft.errors import ModuleError
from weft.nn import ColwiseParallel, RowwiseParallel, SequenceParallel, materialize, report

MESH = {"dp": 2, "tp": 2}
SHARDINGS = {"0": ColwiseParallel("tp"), "2": RowwiseParallel("tp"), "3": SequenceParallel("tp")}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6), nn.LayerNorm(6))


def trained(mesh: Any) -> tuple[list[float], dict[str, Tensor], str]:
    with torch.device("meta"):
        module = build()
    weft.distribute_module(module, mesh, shardings=SHARDINGS, activations={"1": P("dp")})
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    torch.manual_seed(3)
    materialize(module)
    batch = weft.randn(3, 5, 6, mesh=mesh, spec=P("dp"))
    losses = []
    for _ in range(3):
        loss = (module(batch) - batch.roll(1, 0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        other = weft.distribute_module(build(), mesh, shardings=SHARDINGS)
    other.to_empty(device="cpu")
    other.load_state_dict(torch.load(file))
    return losses, {name: x.full_tensor() for name, x in other.state_dict().items()}, str(
        report(module))


def test_as_on_simulated_ranks(gloo: GlooWorld) -> None:
    losses, state, text = weft.testing.run(trained, 4, MESH)[0]
    assert losses[2] < losses[0] and "inputs of 3 pinned" in text
    for mine in gloo.run(trained, MESH):
        assert mine[0] == losses and mine[2] == text
        assert all(torch.equal(mine[1][name], each) for name, each in state.items())


def left_without_values(mesh: Any) -> None:
    with torch.device("meta"):
        module = nn.Linear(1, 1)  # which three of four ranks have nothing of
    weft.distribute_module(module, mesh, shardings={"*": P(("dp", "tp"))})
    materialize(module, lambda part: None)


def test_all_ranks_are_told_what_nothing_was_written_to(gloo: GlooWorld) -> None:
    for error in gloo.outcomes(left_without_values, MESH):
        assert isinstance(error, ModuleError)
        assert "Offenders: weight, bias\n" in str(error)


def kept(mesh: Any) -> list[float]:
    """Each rank's own values, nothing sent."""
    module = nn.Linear(2, 4)
    nn.init.constant_(module.weight, mesh.rank)
    weft.distribute_module(module, mesh, shardings={"*": P(("dp", "tp"))}, src_data_rank=None)
    return module.weight.full_tensor().flatten().tolist()  # type: ignore[operator]


def test_each_rank_s_own_values(gloo: GlooWorld) -> None:
    for found in gloo.run(kept, MESH):
        assert found == pytest.approx([0, 0, 1, 1, 2, 2, 3, 3])
