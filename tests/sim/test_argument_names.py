"""mesh= and placements= are known to every public function, beside torch's and former names."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft import Mesh, P, ShardTensor
from weft.errors import ShardTypeError
from weft.spmd import ShardedLoader

FULL = torch.arange(12.0).view(6, 2)


def same(*tensors: ShardTensor) -> bool:
    first = tensors[0]
    return all(each.sharding == first.sharding and torch.equal(each.to_local(), first.to_local())
               for each in tensors)


def test_a_mesh_by_either_name() -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(FULL, mesh, P("dp"))
        local = x.to_local()
        assert same(x, weft.distribute_tensor(FULL, device_mesh=mesh, placements=P("dp")),
                    weft.distribute_tensor(FULL, mesh=mesh, placements=P("dp")))  # type: ignore
        assert same(x, ShardTensor.from_local(local, device_mesh=mesh, placements=P("dp")),
                    ShardTensor.from_local(local, mesh=mesh, placements=P("dp")))  # type: ignore
        assert same(x.redistribute(device_mesh=mesh, placements=P()),
                    x.redistribute(mesh=mesh, placements=P()))  # type: ignore[call-arg]
        modules: Any = [
            weft.distribute_module(nn.Linear(2, 2), device_mesh=mesh),
            weft.distribute_module(nn.Linear(2, 2), mesh=mesh),  # type: ignore[call-arg]
        ]
        assert all(type(each.weight) is ShardTensor for each in modules)
        collate = weft.nn.ShardedCollator(torch.stack, mesh, P("dp"))
        assert same(*(each(list(FULL)) for each in (
            collate, weft.nn.ShardedCollator(torch.stack, mesh=mesh, placements=P("dp")),
            weft.nn.ShardedCollator(torch.stack, device_mesh=mesh, spec=P("dp")))))  # type: ignore
        loader = DataLoader(TensorDataset(FULL), batch_size=3)
        assert same(*(next(iter(each))[0] for each in (
            ShardedLoader(loader, P("dp"), mesh=mesh),
            ShardedLoader(loader, placements=P("dp"), mesh=mesh),
            ShardedLoader(loader, spec=P("dp"), mesh=mesh))))  # type: ignore[call-arg]

    weft.testing.run(on_rank, mesh={"dp": 2})


def test_a_report_without_ranks() -> None:
    module, mesh = nn.Linear(4, 2, device="meta"), Mesh({"tp": 2})
    shardings = {"weight": P("tp")}
    told = str(weft.nn.report(module, mesh, shardings))
    assert told == str(weft.nn.report(module, mesh=mesh, shardings=shardings))
    assert told == str(weft.nn.report(module, device_mesh=mesh, shardings=shardings))  # type: ignore


def test_one_thing_by_two_names() -> None:
    mesh = Mesh({"tp": 2})
    with pytest.raises(ShardTypeError) as error:
        weft.nn.report(nn.Linear(4, 2), mesh=mesh, device_mesh=mesh)  # type: ignore[call-arg]
    assert str(error.value) == """\
report(device_mesh=, mesh=): both are given.
  Rule: device_mesh is another name of mesh, which is given once.
  Offenders: device_mesh, mesh
  Fix: report(..., mesh=...)"""
    with pytest.raises(ShardTypeError, match=r"^ShardedLoader\(spec=, placements=\): both"):
        ShardedLoader([], P("dp"), spec=P("dp"), placements=P("dp"))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="multiple values for argument 'mesh'"):
        weft.nn.report(nn.Linear(4, 2), mesh, device_mesh=mesh)  # type: ignore[call-arg]


def test_torchs_signatures_keep_their_names() -> None:
    for function in (weft.distribute_tensor, weft.distribute_module, ShardTensor.from_local):
        assert list(inspect.signature(function).parameters)[1] == "device_mesh"
    assert list(inspect.signature(ShardTensor.redistribute).parameters)[1:3] == [
        "device_mesh", "placements"]
