"""pickle, torch.save and torch.load: every rank its own block, in the same world or told how."""

from __future__ import annotations

import io
import pickle
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import weft
from tests.sharded import WAYS, Make, agree
from weft import (
    Layout,
    Mesh,
    MeshError,
    P,
    Partial,
    Replicate,
    Shard,
    ShardTensor,
    StridedShard,
    UnsupportedOpError,
)

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8


def through(value: Any, **options: Any) -> Any:
    """Saved and loaded again, which takes nothing but data."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, **options)


def test_layouts_and_placements_are_data() -> None:
    mesh = Mesh({"dp": 2, "tp": 3})
    values = [
        mesh, P("dp", None, partial={"tp": "sum"}),
        Layout(mesh, (5, 6), P(("tp", "dp")), {0: (1, 1, 1, 1, 1, 0)}),
        [Shard(0), StridedShard(1, split_factor=2), Replicate(), Partial("max")],
    ]
    assert through(values) == values


def tensors(make: Make) -> Any:
    x, whole = make(X), make(torch.arange(5))
    x.tag = "kept"
    (x * x).sum().backward()
    found = through({"x": x, "more": [whole, x.detach().t(), x * 2, x[1:3], x.float()]})
    again, more = found["x"], found["more"]
    again.requires_grad_()
    (again * 3).sum().backward()
    return [
        again, again.tag, again.is_leaf, again.grad, more, [one.requires_grad for one in more],
        [one.is_leaf for one in more], [one.stride() for one in more[:2]],
        pickle.loads(pickle.dumps(x)), pickle.loads(bytes(ForkingPickler.dumps(whole))),
        through(whole, map_location="cpu"),
    ]


def parameters(make: Make) -> Any:
    p = nn.Parameter(make(X, False))
    one, other = through([p, p])
    fixed = through(nn.Parameter(make(X, False), requires_grad=False))
    return [
        one, one is other, isinstance(one, nn.Parameter), one.requires_grad, one.is_leaf,
        isinstance(fixed, nn.Parameter), fixed.requires_grad,
    ]


def modules(make: Make) -> Any:
    def build() -> nn.Module:
        module = nn.Linear(6, 5)
        module.weight = nn.Parameter(make(X, False))
        module.bias = nn.Parameter(make(X[:, 0].contiguous(), False))
        module.register_buffer("seen", make(torch.arange(4)))
        return module

    module, other = build(), build()
    optimizer = torch.optim.AdamW(module.parameters())
    module(make(X, False)).sum().backward()
    optimizer.step()
    kept = through({"model": module.state_dict(), "optimizer": optimizer.state_dict()})
    other.load_state_dict(kept["model"])
    resumed = torch.optim.AdamW(other.parameters())
    resumed.load_state_dict(kept["optimizer"])
    for one, steps in ((module, optimizer), (other, resumed)):
        one.zero_grad()
        one(make(X, False)).sum().backward()
        steps.step()
    whole = pickle.loads(pickle.dumps(module))
    return [[list(one.state_dict().values()) for one in (module, other, whole)],
            resumed.state_dict()["state"][0]["exp_avg"]]


def shared_memory(make: Make) -> Any:
    x = make(X, False)
    one, same = through([x, x.view(5, 6)])
    one.zero_()
    return [x, same]


PROGRAMS = [tensors, parameters, modules, shared_memory]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_is_loaded_is_what_was_saved(program: Any, way: str) -> None:
    agree(program, way)


@pytest.mark.parametrize(
    ("axes", "spec", "sizes"),
    [({"x": 3}, P("x"), {0: (1, 0, 4)}), ({"dp": 2, "tp": 2}, P(("tp", "dp")), {}),
     ((2, 2), P(1, partial={0: "max"}), {}), ((3,), P(None, 0), {})],
)
def test_layouts_are_kept_and_nothing_is_sent(axes: Any, spec: P, sizes: Any) -> None:
    def on_rank(mesh: Any) -> bool:
        layout = Layout(mesh, (5, 6), spec, sizes=sizes)
        x = weft.distribute_tensor(X, mesh, layout, src_data_rank=None)
        with weft.explain() as log:
            y = through(x)
        assert not log.events and type(y) is ShardTensor
        assert y.sharding == layout and y.device_mesh is mesh and y._local.equal(x._local)
        return torch.equal(y.full_tensor(), X)

    assert all(weft.testing.run(on_rank, mesh=axes))


def write(folder: Path, num_ranks: int = 4) -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P("dp", "tp"), src_data_rank=None)
        torch.save({"x": x}, folder / f"{mesh.rank}.pt")

    weft.testing.run(on_rank, mesh={"dp": 2, "tp": num_ranks // 2})


def whole(mesh: Any, folder: Path) -> torch.Tensor:
    return torch.load(folder / f"{mesh.rank}.pt")["x"].full_tensor()


_ONE_WROTE = [
    "       if one rank wrote, its file has its blocks alone; next time every rank calls",
    "       torch.distributed.checkpoint.save(state, checkpoint_id=folder), or, before one rank "
    "writes,",
    "       {name: x.full_tensor() for name, x in model.state_dict().items()}",
]


def test_another_world_is_told_how_to_read(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(MeshError) as caught:
        torch.load(tmp_path / "2.pt")
    assert str(caught.value).splitlines() == [
        "pickle.load, torch.load: the block of a tensor [5@dp, 6@tp] was written by rank 2 of "
        "Mesh({'dp': 2, 'tp': 2}), and is read by rank 0 of a world of 1.",
        "  Rule: a rank reads what the same rank has written; where the world is another, all "
        "blocks are read by as many ranks as there were and joined.",
        "  Offenders: [5@dp, 6@tp]",
        '  Fix: def whole(mesh): return torch.load(f"{mesh.rank}.pt").full_tensor()',
        "       full = weft.testing.run(whole, num_ranks=4)[0]",
        "       x = weft.distribute_tensor(full, mesh, placements)",
        *_ONE_WROTE,
    ]
    with pytest.raises(MeshError, match="rank 0 of a world of 1"):
        torch.load(tmp_path / "0.pt")

    def exchanged(mesh: Any) -> list[str]:
        with pytest.raises(MeshError) as caught:
            torch.load(tmp_path / f"{3 - mesh.rank}.pt")
        return str(caught.value).splitlines()

    lines = weft.testing.run(exchanged, num_ranks=4)[0]
    assert "written by rank 3" in lines[0]
    assert lines[3:] == [
        '  Fix: each rank reads its own file: torch.load(f"{mesh.rank}.pt")', *_ONE_WROTE]


def test_a_block_that_is_the_whole_serves_any_rank(tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"

    def wrote(mesh: Any) -> None:
        if mesh.rank == 2:
            rows = Layout(mesh, (5, 6), P("dp"), sizes={0: (0, 5)})  # rank 2 has them all
            state = {
                "all": weft.distribute_tensor(X, mesh, src_data_rank=None).requires_grad_(),
                "rows": weft.distribute_tensor(X, mesh, rows, src_data_rank=None),
                "scalar": weft.distribute_tensor(X[0, 0], mesh, src_data_rank=None),
            }
            torch.save(state, path)
            torch.save(weft.ones(5, 6, mesh=mesh, placements=P(partial={"tp": "sum"})),
                       tmp_path / "partial.pt")

    weft.testing.run(wrote, mesh={"dp": 2, "tp": 2})

    def read(mesh: Any) -> Any:
        state = torch.load(path)
        assert all(type(one) is ShardTensor for one in state.values())
        with pytest.raises(MeshError, match="rank 2") if mesh.rank != 2 else nullcontext():
            torch.load(tmp_path / "partial.pt")
        assert state["all"].requires_grad and state["all"].is_leaf
        return [one.full_tensor() for one in state.values()], str(state["rows"].sharding)

    for values, layout in weft.testing.run(read, mesh={"dp": 2, "tp": 2}):
        assert layout == "[5@dp{0,5}, 6]"
        assert [one.equal(due) for one, due in zip(values, (X, X, X[0, 0]))] == [True] * 3
    alone = torch.load(path)  # as of a program that was not distributed
    assert {type(one) for one in alone.values()} == {torch.Tensor}
    assert alone["all"].equal(X) and alone["rows"].equal(X) and alone["all"].requires_grad

    def trained(mesh: Any) -> torch.Tensor:
        model = weft.distribute_module(nn.Linear(2, 3), mesh)
        if mesh.rank == 0:
            torch.save(model.state_dict(), path)
        return model.weight.full_tensor()

    due = weft.testing.run(trained, mesh={"dp": 3})[0]
    plain = nn.Linear(2, 3)
    plain.load_state_dict(torch.load(path))
    assert plain.weight.equal(due)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", [dcp.save, dcp.async_save])
def test_a_checkpoint_of_simulated_ranks_is_whole(tmp_path: Path, save: Any) -> None:
    def wrote(mesh: Any) -> None:
        rows = Layout(mesh, (5, 6), P("dp"), sizes={0: (0, 3, 2)})
        part = weft.init_mesh({"x": 2}, ranks=(1, 2))  # without the first rank
        state = {
            "x": weft.distribute_tensor(X, mesh, rows), "number": 3,
            "more": {"columns": weft.distribute_tensor(X, mesh, P(None, "dp")), "plain": X + 1},
            "part": weft.distribute_tensor(X, part, P("x")),
            "model": weft.distribute_module(nn.Linear(2, 3), mesh, shardings={"*": P("dp")}),
        }
        made = save(state, checkpoint_id=tmp_path)
        if save is dcp.async_save:
            made.result()
        again = {"x": weft.zeros(5, 6, dtype=X.dtype, mesh=mesh, placements=P(None, "dp"))}
        dcp.load(again, checkpoint_id=tmp_path)
        assert again["x"].full_tensor().equal(X)
        with pytest.raises(UnsupportedOpError, match="partial value"):
            save({"x": weft.ones(2, mesh=mesh, placements=P(partial={"dp": "sum"}))},
                 checkpoint_id=tmp_path)
        with pytest.raises(UnsupportedOpError, match="a simulated rank writes its block of 'x'"):
            state["x"].__create_write_items__("x", state["x"])

    weft.testing.run(wrote, mesh={"dp": 3})
    state = {"x": torch.zeros_like(X), "part": torch.zeros_like(X), "number": 0,
             "more": {"columns": torch.zeros_like(X), "plain": torch.zeros_like(X)}}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["x"].equal(X) and state["part"].equal(X) and state["number"] == 3
    assert state["more"]["columns"].equal(X) and state["more"]["plain"].equal(X + 1)


def test_it_does_as_it_is_told(tmp_path: Path) -> None:
    """All blocks read in one process, then laid out over more ranks."""
    write(tmp_path)
    full = weft.testing.run(lambda mesh: whole(mesh, tmp_path), num_ranks=4)[0]
    assert torch.equal(full, X)

    def onto_others(mesh: Any) -> bool:
        x = weft.distribute_tensor(full, mesh, P("x"), src_data_rank=None)
        return torch.equal(x.full_tensor(), X)

    assert all(weft.testing.run(onto_others, mesh={"x": 3}))


def test_a_mesh_of_another_shape_over_the_same_ranks(tmp_path: Path) -> None:
    write(tmp_path)

    def on_rank(mesh: Any) -> Any:
        x = torch.load(tmp_path / f"{mesh.rank}.pt")["x"]
        assert x.device_mesh != mesh and x.device_mesh.size() == 4
        y = x.redistribute(mesh, P(None, "all"))
        return str(y.sharding), torch.equal(y.full_tensor(), X)

    assert weft.testing.run(on_rank, mesh={"all": 4}) == [("[5, 6@all]", True)] * 4


def test_ranks_outside_the_mesh_write_and_read_nothing() -> None:
    def on_rank(mesh: Any) -> Any:
        pair = weft.init_mesh({"x": 2}, ranks=(1, 2))
        x = through(weft.distribute_tensor(X, pair, P("x"), src_data_rank=None))
        assert x.shape == (5, 6) and x.device_mesh is pair
        return None if pair.here is None else x.full_tensor()

    first, one, two = weft.testing.run(on_rank, num_ranks=3)
    assert first is None and torch.equal(one, X) and torch.equal(two, X)
