"""torch.distributed.checkpoint: values and random state, read in other layouts than written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import weft
from tests.gloo import GlooWorld
from weft import Layout, P

MESH = {"dp": 2, "tp": 2}
LATE = {0: (0, 0, 0, 7)}
"""Sizes by which all blocks begin at the same place."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 3)
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("count", torch.tensor(2.0))

    def forward(self, x: Any) -> Any:
        return self.down(self.drop(self.up(x)))


def built(mesh: Any, shardings: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    module = weft.distribute_module(Net().double(), mesh, shardings=shardings)
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def train(mesh: Any, module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        x = weft.randn(6, 5, mesh=mesh, spec=P(mesh.axis_names[0]), dtype=torch.float64)
        module(x).square().mean().backward()
        optimizer.step()


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.full_tensor() for name, each in module.state_dict().items()}  # type: ignore


def state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_module, of_optimizer = get_state_dict(module, optimizer)
    return {"module": of_module, "optimizer": of_optimizer, "random": torch.get_rng_state()}


def write(mesh: Any, folder: str) -> dict[str, torch.Tensor]:
    """A checkpoint in the middle of a run; the parameters at its end."""
    sizes = Layout(mesh, (7, 5), P(("dp", "tp")), sizes=LATE)
    module, optimizer = built(mesh, {
        "up.weight": sizes, "up.bias": P("tp"), "down.weight": P("dp", "tp"), "none": P(None, "tp"),
    })
    train(mesh, module, optimizer, 2)
    dcp.save(state(module, optimizer), checkpoint_id=folder)
    train(mesh, module, optimizer, 2)
    return whole(module)


def read(mesh: Any, folder: str) -> tuple[dict[str, torch.Tensor], int]:
    """The run resumed in other layouts, and how many blocks lie as they did."""
    module, optimizer = built(mesh, {
        "up.bias": P("dp"), "up.weight": P(None, "tp"), "down.*": P(("tp", "dp")), "none": P(),
    })
    layouts = [each.sharding for each in module.parameters()]  # type: ignore[attr-defined]
    torch.manual_seed(9)
    found = state(module, optimizer)
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=found["module"],
                   optim_state_dict=found["optimizer"])
    torch.set_rng_state(found["random"])
    train(mesh, module, optimizer, 2)
    assert layouts == [each.sharding for each in module.parameters()]  # type: ignore
    return whole(module), len(layouts)


def test_a_run_is_resumed_in_other_layouts(gloo: GlooWorld, tmp_path: Path) -> None:
    (first, *_) = gloo.run(write, MESH, str(tmp_path))
    for axes in (MESH, {"dp": 1, "tp": 4}):
        for found, count in gloo.run(read, axes, str(tmp_path)):
            assert count == 4 and list(found) == list(first)
            for name, value in found.items():
                torch.testing.assert_close(value, first[name], rtol=1e-12, atol=1e-12)


def exchanged(mesh: Any, folder: str) -> list[torch.Tensor]:
    """A ShardTensor read as a DTensor, as a plain tensor, and on a mesh of other ranks."""
    full = torch.arange(35.0).view(7, 5)
    dcp.save({"x": weft.distribute_tensor(full, mesh, P("tp", "dp"))}, checkpoint_id=folder)
    theirs = distribute_tensor(torch.zeros(7, 5), init_device_mesh("cpu", (4,)), [Shard(1)])
    part = weft.init_mesh({"x": 2}, ranks=(3, 1))
    targets = [theirs, torch.zeros(7, 5), weft.zeros(7, 5, mesh=part, spec=P("x"))]
    for target in targets:
        dcp.load({"x": target}, checkpoint_id=folder)
    assert isinstance(theirs, DTensor)
    found = [theirs.redistribute(placements=[Replicate()]).to_local(), targets[1]]
    return [*found, targets[2].full_tensor()] if part.here is not None else found


def test_others_read_what_is_written(gloo: GlooWorld, tmp_path: Path) -> None:
    for rank, found in enumerate(gloo.run(exchanged, MESH, str(tmp_path))):
        assert len(found) == 2 + rank % 2
        assert all(torch.equal(one, torch.arange(35.0).view(7, 5)) for one in found)


def through_async_save(mesh: Any, folder: str) -> list[bool]:
    """Ragged blocks, saved while they are overwritten; read on 3, 1 and 2x2 ranks, by FSDP2, by a
    plain module, and from FSDP2 again."""
    sizes = Layout(mesh, (7, 5), P("x"), sizes={0: (0, 4, 2, 1)})
    module, optimizer = built(mesh, {"up.weight": sizes, "down.weight": P(None, "x")})
    train(mesh, module, optimizer, 1)
    first, states = whole(module), get_state_dict(module, optimizer)
    saving = dcp.async_save(states[0], checkpoint_id=folder)
    train(mesh, module, optimizer, 1)
    saving.result()  # type: ignore[union-attr]
    torch.manual_seed(3)
    theirs = fully_shard(Net().double(), mesh=init_device_mesh("cpu", (4,)))
    others = [theirs, Net().double()]
    for axes in ({"x": 3}, {"x": 1}, {"x": 2, "y": 2}):
        part = weft.init_mesh(axes)
        others.append(weft.distribute_module(
            Net().double(), part, shardings={"up.weight": P(part.axis_names)}))
    for at, other in enumerate(others):
        state = other.state_dict()
        dcp.load(state, checkpoint_id=folder if at < 2 else f"{folder}/theirs")
        if at == 0:
            dcp.save(state, checkpoint_id=f"{folder}/theirs")
        other.load_state_dict(state)
    return [
        all(torch.equal(value, first[name]) for name, value in whole_of(other).items())
        for other in others
    ]


def whole_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Of those that this rank is in the mesh of."""
    state = {name: value for name, value in module.state_dict().items()
             if getattr(getattr(value, "device_mesh", None), "here", 0) is not None}
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in state.items()}


def test_a_copy_is_saved_while_training_goes_on(gloo: GlooWorld, tmp_path: Path) -> None:
    assert gloo.run(through_async_save, {"x": 4}, str(tmp_path)) == [[True] * 5] * 4


def full_states(mesh: Any) -> tuple[list[str], list[bool]]:
    """What each rank gets, and that it is the value."""
    module, optimizer = built(mesh, {"up.weight": P("x"), "down.weight": P(None, "x")})
    train(mesh, module, optimizer, 1)
    same, kinds = [], []
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        for state in get_state_dict(module, optimizer, options=options):
            flat = flatten_state_dict(state)[0]
            kinds.append(f"{len(flat)} {sorted({type(one).__name__ for one in flat.values()})}")
            same += [torch.equal(flat[name], value) for name, value in whole(module).items()
                     if name in flat]
    return kinds, same


def test_full_state_dicts_hold_plain_tensors(gloo: GlooWorld) -> None:
    (kinds, same), *others = gloo.run(full_states, {"x": 4})
    assert kinds == ["6 ['Tensor']", kinds[1]] * 2 and "ShardTensor" not in kinds[1]
    assert same == [True] * 12
    for there, found in others:
        assert there == [*kinds[:2], "0 []", "0 []"] and found == [True] * 6


def terms(mesh: Any, folder: str) -> str:
    x = weft.ones(3, mesh=mesh, spec=P(partial={"tp": "sum"}))
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"x": x}, checkpoint_id=folder)
    return str(caught.value)


def test_terms_are_no_values_to_write(gloo: GlooWorld, tmp_path: Path) -> None:
    for said in gloo.run(terms, MESH, str(tmp_path)):
        assert "Rule: a checkpoint holds values." in said
