"""Values and files of ShardTensors on real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.gloo import GlooWorld
from tests.sharded import same
from tests.sim.test_tensor_saved import modules, tensors
from tests.sim.test_tensor_values import comparisons, lists_of_tensors, numbers, sizes
from weft import LayoutError, MeshError, P, ShardTensor

MESH = {"dp": 2, "tp": 2}
X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8
SPECS = [P("dp", "tp"), P(("tp", "dp")), P("dp", partial={"tp": "sum"})]
PROGRAMS = {one.__name__: one for one in (
    numbers, sizes, lists_of_tensors, comparisons, tensors, modules
)}


def plain(value: Any) -> Any:
    if isinstance(value, ShardTensor):
        return value.detach().full_tensor()
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def on_rank(mesh: Any, name: str, place: int) -> Any:
    spec = SPECS[place]

    def make(full: Tensor, grad: bool = True) -> ShardTensor:
        cut = P(*spec.entries[: full.dim()], partial=dict(spec.partial) if spec.partial else None)
        made = weft.distribute_tensor(full, mesh, cut)
        return made.requires_grad_(grad and full.is_floating_point())

    return plain(PROGRAMS[name](make))


def dense(full: Tensor, grad: bool = True) -> Tensor:
    return full.clone().requires_grad_(grad and full.is_floating_point())


@pytest.mark.parametrize("place", range(len(SPECS)))
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(gloo: GlooWorld, name: str, place: int) -> None:
    expected = plain(PROGRAMS[name](dense))
    for found in gloo.run(on_rank, MESH, name, place):
        same(found, expected, name)


def loss_of(kind: str, x: Tensor, target: Tensor) -> Tensor:
    match kind:
        case "sum":
            return (x * x).sum()
        case "mean":
            return (x * x).mean()
        case "cross_entropy":
            return F.cross_entropy(x, target)
        case "one element":  # one rank has it
            return (x * x).sum(1)[4:]
        case _:
            return ((x * x).sum(0, keepdim=True) @ x.new_ones(6, 1)).view(1, 1)


LOSSES = ["sum", "mean", "cross_entropy", "one element", "product"]


def known_on_one_rank(mesh: Any, place: int) -> Any:
    """Only one rank asks: an answer that takes others would not come."""
    found = []
    for kind in LOSSES:
        x = weft.distribute_tensor(X, mesh, SPECS[place]).requires_grad_()
        target = weft.distribute_tensor(torch.arange(5), mesh, P("dp"))
        loss = loss_of(kind, x, target)
        loss.backward()
        if mesh.rank == 3:
            if not loss.dim():
                assert f"{loss}" == f"{loss.item()}"
                assert abs(float(f"{loss:.9f}") - loss.item()) < 1e-9
            found.append([loss.item(), float(loss.detach()), loss.detach().view(()).item()
                          if loss.sharding.is_replicated else loss.data.item()])
    return found


@pytest.mark.parametrize("place", range(len(SPECS)))
def test_a_loss_is_known_after_its_backward(gloo: GlooWorld, place: int) -> None:
    found = gloo.run(known_on_one_rank, MESH, place)
    assert found[:3] == [[], [], []]
    for kind, values in zip(LOSSES, found[3]):
        expected = loss_of(kind, X, torch.arange(5)).item()
        assert values == pytest.approx([expected] * 3)


def write(mesh: Any, folder: str) -> None:
    x = weft.distribute_tensor(X, mesh, P("dp", "tp"))
    torch.save({"x": x}, Path(folder) / f"{mesh.rank}.pt")


def read(mesh: Any, folder: str) -> Any:
    x = torch.load(Path(folder) / f"{mesh.rank}.pt")["x"]
    with pytest.raises(MeshError, match="written by rank"):
        torch.load(Path(folder) / f"{(mesh.rank + 1) % 4}.pt")
    y = x.redistribute(mesh, P(None, "all"))
    return x.full_tensor(), y.full_tensor(), str(y.sharding)


def test_files_are_read_by_another_program(gloo: GlooWorld, tmp_path: Path) -> None:
    gloo.run(write, MESH, str(tmp_path))
    for one, other, layout in gloo.run(read, {"all": 4}, str(tmp_path)):
        assert torch.equal(one, X) and torch.equal(other, X) and layout == "[5, 6@all]"


def written_in_turns(mesh: Any, folder: str) -> Any:
    path = Path(folder) / "field.npy"
    if mesh.rank == 0:
        np.lib.format.open_memmap(path, "w+", np.float64, tuple(X.shape))

    def put(index: tuple[slice, ...], block: Tensor) -> None:
        np.load(path, mmap_mode="r+")[index] = block.numpy()

    x = weft.distribute_tensor(X, mesh, P("dp", "tp"))
    weft.to_callback(x, put, chunks=(2, 4), in_turns=True)
    with pytest.raises(LayoutError, match="ZeroDivisionError"):
        weft.to_callback(x, lambda index, block: 1 / index[0].start)
    return torch.from_numpy(np.load(path))


def test_blocks_are_written_by_their_ranks(gloo: GlooWorld, tmp_path: Path) -> None:
    for found in gloo.run(written_in_turns, MESH, str(tmp_path)):
        assert torch.equal(found, X)
