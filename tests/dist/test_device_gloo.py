"""A device that is not the CPU over real processes: groups of a backend of its own, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import weft
from tests.device import backend, group
from tests.gloo import GlooWorld
from weft import P


@pytest.fixture
def fresh() -> Iterator[GlooWorld]:
    """Ranks of their own: the device stays in a process."""
    world = GlooWorld(2)
    yield world
    world.close()


def program(mesh: Any, folder: str) -> list[Any]:
    backend.install()
    group.register()
    mesh = weft.init_mesh({"x": 2}, backend.NAME)
    torch.manual_seed(0)
    x = weft.distribute_tensor(torch.arange(28.0).view(7, 4), mesh, P("x"))
    layer = weft.distribute_module(nn.Linear(4, 5), mesh, shardings={"weight": P(None, "x")})
    loss = layer(x).square().mean()
    loss.backward()
    moved = x.redistribute(placements=P(None, "x"))
    dcp.save({"weight": layer.weight}, checkpoint_id=folder)
    read = {"weight": weft.zeros(5, 4, mesh=mesh, spec=P("x"))}
    dcp.load(read, checkpoint_id=folder)
    assert {one.to_local().device.type for one in (moved, read["weight"])} == {backend.NAME}
    assert dist.get_backend(mesh.get_group()) == group.BACKEND
    return [loss.item(), layer.weight.grad.cpu().full_tensor(), moved.cpu().full_tensor(),
            torch.sort(x, 0, descending=True)[0].cpu().full_tensor(),
            read["weight"].cpu().full_tensor(), layer.weight.detach().cpu().full_tensor()]


def test_a_step_over_groups_of_another_device(fresh: GlooWorld, tmp_path: Path) -> None:
    loss, gradient, moved, backwards, read, weight = fresh.run(program, {"x": 2}, str(tmp_path))[1]
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 5), torch.arange(28.0).view(7, 4)
    due = layer(x).square().mean()
    due.backward()
    torch.testing.assert_close([torch.tensor(loss), gradient], [due, layer.weight.grad])
    assert moved.equal(x) and backwards.equal(x.flip(0))
    assert read.equal(weight) and weight.equal(layer.weight)
