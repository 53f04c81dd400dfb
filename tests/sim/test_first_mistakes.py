"""What newcomers write first, and the line that the error tells them to write."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft import Mesh, P, collectives, spmd  # noqa: F401

FULL = torch.arange(32.0).view(8, 4)

MISTAKES: dict[str, tuple[str, str]] = {
    "weft.testing.run(2, lambda mesh: 1)":
        ("run(fn): it is of type int.", "run(lambda mesh: fn(mesh, ...), ...)"),
    "weft.testing.run(lambda: 1, 2)":
        ("run(fn): fn(mesh) is no call of it: too many positional arguments.",
         "run(lambda mesh: fn(mesh, ...), ...)"),
    "weft.testing.run(lambda rank, mesh: 1, 2)":
        ("run(fn): fn(mesh) is no call of it: missing a required argument: 'mesh'.",
         "run(lambda mesh: fn(mesh, ...), ...)"),
    "weft.dry_run(lambda: 1, {'dp': 2})":
        ("dry_run(fn): fn(mesh) is no call of it: too many positional arguments.",
         "dry_run(lambda mesh: fn(mesh, ...), ...)"),
    "weft.init_mesh(dp=2, tp=2)":
        ("init_mesh(dp=, tp=): 2 named arguments are none of its 4.",
         'weft.init_mesh({"dp": 2, "tp": 2})'),
    "weft.testing.session({'dp': 2}, 3)":
        ("run(device_type): 3 is no type of device.", "weft.init_mesh(axes, 'cuda')"),
    "weft.init_mesh('dp=2,tp=2')":
        ("init_mesh(axes): axes is 'dp=2,tp=2', and no sizes follow.",
         'weft.init_mesh({"dp": 2, "tp": 2})'),
    "weft.from_callback((8, 4), mesh, P('dp'), FULL)":
        ("from_callback(shape, mesh, placements, fn): fn is of type Tensor.",
         "weft.from_callback(shape, mesh, P(...), lambda i: data[i])"),
    "collectives.ppermute(FULL, 'dp', {0: 1}, mesh=mesh)":
        ("ppermute(perm): {0: 1} is of type dict.", "[(i, (i + 1) % 2) for i in range(2)]"),
    "weft.local_map(lambda a: a, in_specs=P('dp'), out_specs=P('up'), mesh=mesh)(FULL)":
        ("local_map(<lambda>)(out_specs=P('up')): 'up' is no axis of Mesh(dp=2).",
         "one of 'dp'"),
    "spmd.ShardedLoader([FULL, FULL], ('dp',), mesh=mesh)":
        ("ShardedLoader(dataloader): it is of type list.",
         "torch.utils.data.DataLoader(dataset, batch_size); or "
         "weft.distribute_tensor(batch, mesh, P(...)) for each batch"),
    "weft.distribute_tensor(nn.Linear(2, 2), mesh)":
        ("distribute_tensor(tensor): it is of type torch.nn.modules.linear.Linear.",
         "weft.distribute_module(module, mesh, shardings=...), or its parameters"),
    "weft.ones(4, mesh=mesh).redistribute('dp')":
        ("redistribute(device_mesh): 'dp' is of type str.", "placements=P('dp')"),
    "weft.ones(4, mesh=mesh).redistribute()":
        ("redistribute(): neither a mesh nor placements are given for [4].",
         "x.redistribute(placements=P())"),
    "mesh.get_group('dp')":
        ("get_group: Mesh(dp=2) lives in a SimulatedWorld, which has no process groups.",
         "weft run -n 2 script.py, for what needs torch's groups; weft.distribute_module and "
         "mesh.comm((axis,)) need none"),
}


def test_the_error_names_the_call_and_the_line_to_write() -> None:
    def on_rank(mesh: Any) -> None:
        for text, (head, fix) in MISTAKES.items():
            with pytest.raises(weft.WeftError) as error:
                eval(text, {**globals(), "mesh": mesh, "nn": nn})
            lines = str(error.value).splitlines()
            assert (lines[0], lines[-1]) == (head, f"  Fix: {fix}"), text

    weft.testing.run(on_rank, mesh={"dp": 2})


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(weft.MeshError) as error:
        weft.init_mesh({"dp": 1}, "cuda")
    assert str(error.value) == (
        f"init_mesh(device_type): it is 'cuda', and torch {torch.__version__} finds no such "
        "device.\n"
        "  Rule: each rank has a device of the type of its mesh.\n"
        "  Offenders: cuda\n"
        '  Fix: weft.init_mesh(axes, "cpu"); weft doctor says what torch finds')
    with pytest.raises(weft.MeshError) as error:
        weft.ones(2, mesh=weft.init_mesh({"dp": 1})).cuda()
    lines = str(error.value).splitlines()
    assert lines[0].startswith("to(device): it is 'cuda'")
    assert lines[-1] == '  Fix: to("cpu"); weft doctor says what torch finds'


def test_simulated_ranks_in_a_dry_run() -> None:
    def program(mesh: Any) -> float:
        return weft.ones(4, mesh=mesh).sum().item()

    with pytest.raises(weft.CommunicationError) as error:
        weft.dry_run(lambda mesh: weft.testing.run(program, mesh={"tp": 2}), {"dp": 8})
    lines = str(error.value).splitlines()
    assert lines[0] == ("weft.testing.run: it starts 2 simulated ranks inside a dry run, which is "
                        "rank 0 of 8.")
    assert lines[3] == "  Fix: in a script: mesh = weft.init_mesh({'tp': 2}), and program(mesh)"


def test_workers_of_a_loader_cannot_send_sharded_rows() -> None:
    def on_rank(mesh: Any) -> None:
        with pytest.raises(weft.UnsupportedOpError, match="workers of a DataLoader") as error:
            weft.ones(4, mesh=mesh, placements=P("dp"))._typed_storage()
        assert "  Fix: DataLoader(..., num_workers=0)" in str(error.value).splitlines()

    weft.testing.run(on_rank, mesh={"dp": 2})


def test_modes_that_no_with_enters_say_so() -> None:
    model = nn.Linear(2, 2)
    for call, fix in {
        "weft.strict()": "with weft.strict(): ...", "weft.debug()": "with weft.debug(): ...",
        "weft.explain()": "with weft.explain() as log: ...",
        "weft.nn.accumulate(model)": "with weft.nn.accumulate(model): ...",
    }.items():
        with pytest.warns(weft.WeftWarning) as warned:
            eval(call, {"weft": weft, "model": model})
        assert [str(one.message) for one in warned] == [f"{call} does nothing by itself: {fix}"]
        assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with weft.strict(), weft.explain() as log:
            assert not log.events
        assert weft.strict()(lambda: 3)() == 3  # type: ignore[operator]


def test_a_picture_has_two_dims() -> None:
    for shape, fix in (((6,), "x[None]"), ((2, 3, 4, 5), "x[0, 0]")):
        with pytest.raises(weft.ShardTypeError) as error:
            weft.plot(weft.ones(*shape, mesh=weft.init_mesh({"dp": 1})))
        assert str(error.value).endswith(f"  Fix: weft.plot({fix})")


def test_a_rank_too_many() -> None:
    def on_rank(mesh: Any) -> None:
        if mesh.here is None:
            with pytest.raises(weft.MeshError) as error:
                weft.ones(4, mesh=mesh, placements=P("dp")).sum().item()
            assert ("  Fix: weft run -n 2, if there are more ranks than meant"
                    in str(error.value).splitlines())

    weft.testing.run(on_rank, 3, mesh={"dp": 2})


def test_torchs_ranks_in_simulated_ones() -> None:
    with pytest.raises(ValueError, match="init_process_group") as error:
        weft.testing.run(lambda mesh: torch.distributed.get_rank(), 2)
    assert error.value.__notes__[1] == (
        "simulated ranks have no torch.distributed: mesh.rank, mesh.size() and "
        "mesh.get_local_rank(axis) say which rank this is, or the program runs over processes: "
        "weft run -n 2 script.py")


def test_names_of_torch_and_torch_xla() -> None:
    for text, end in {
        "weft.eye(4)": "; torch has torch.eye, which takes ShardTensors; what it makes without any "
                       "is sharded by weft.distribute_tensor(value, mesh, P(...))",
        "spmd.use_spmd()": "; in its place: nothing to switch on: a tensor is sharded when it is "
                           "made so",
        "collectives.all_reduce(FULL, 'dp')":
            "module 'weft.collectives' has no attribute 'all_reduce'; in its place: "
            "weft.collectives.psum(x, axis), pmax, pmin or pmean, of a rank's own tensor",
        "spmd.other()": "has no attribute 'other'",
        "weft.ones(2, mesh=Mesh(1))._spec":
            "'ShardTensor' object has no attribute '_spec'; in its place: x.sharding",
        "weft.ones(2, mesh=Mesh(1))._local_tensor": "; in its place: x.to_local()",
        "weft.ones(2, mesh=Mesh(1)).mesh": "; in its place: x.device_mesh",
        "weft.ones(2, mesh=Mesh(1)).full": "; in its place: x.full_tensor()",
        "weft.DataLoader": '; in its place: torch\'s, and weft.ShardedLoader(loader, P("dp"), '
                           "mesh=mesh) around it",
        "weft.no_grad": "; in its place: torch.no_grad(), as everywhere",
        "weft.ones(2, mesh=Mesh(1)).local_shards": "; in its place: weft.spmd.local_shards(x)",
    }.items():
        with pytest.raises(AttributeError) as error:
            eval(text)
        assert str(error.value).endswith(end)
    mine: Any = weft.ones(2, mesh=Mesh(1))
    mine.mesh = "a program's own"
    assert mine.mesh == "a program's own" and not hasattr(weft.ones(2, mesh=Mesh(1)), "mesh")


def test_ranks_that_each_of_several_processes_simulates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(weft.WeftWarning, match="^each of the 4 processes that were started simula"):
        weft.testing.run(lambda mesh: None, 2)
    monkeypatch.setenv("RANK", "1")
    weft.testing.run(lambda mesh: None, 2)
