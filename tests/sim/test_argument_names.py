"""Arguments by the names of other libraries; what an error says of names that no call has."""

from __future__ import annotations

import inspect
import operator
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft import Layout, Mesh, P, ShardTensor, collectives, spmd
from weft.core.counterparts import COUNTERPARTS
from weft.errors import MeshError, ShardTypeError
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


SAME = [
    "weft.distribute_tensor(FULL, mesh, spec=P('dp'))",
    "weft.distribute_tensor(FULL, sharding=LAYOUT)",
    "weft.distribute_tensor(FULL, mesh, partition_spec=P('dp'), src=0)",
    "weft.scatter_tensor(FULL, src=0, device_mesh=mesh, sharding=P('dp'))",
    "weft.from_callback((6, 2), LAYOUT, lambda index: FULL[index])",  # as in JAX
    "weft.from_callback((6, 2), sharding=LAYOUT, data_callback=lambda index: FULL[index])",
    "weft.from_callback((6, 2), device_mesh=mesh, spec=P('dp'), fn=lambda index: FULL[index])",
    "ShardTensor.from_local(local, mesh, spec=P('dp'), global_shape=(6, 2))",
    "weft.distribute_tensor(FULL, mesh).redistribute(spec=P('dp'))",
    "weft.distribute_tensor(FULL, mesh).redistribute(sharding=LAYOUT)",
    "weft.arange(12.0, mesh=mesh).view(6, 2).redistribute(partition_spec=P('dp'))",
    "weft.reshard({'x': weft.distribute_tensor(FULL, mesh)}, device_mesh=mesh,"
    " shardings={'x': P('dp')})['x']",
    "spmd.mark_sharding(FULL, device_mesh=mesh, spec=('dp', None))",
    "spmd.mark_sharding(FULL, mesh, sharding=('dp', None))",
    "spmd.disable_manual_sharding(local, spec=('dp',), global_shape=(6, 2), mesh=mesh)",
    "weft.local_map(f=lambda x: x, in_specs=P('dp'), out_specs=P('dp'), check_rep=True)(good)",
    "weft.distribute_module(nn.Linear(2, 6), mesh, parallelize_plan={'weight': P('dp')})"
    ".weight.data.zero_() + good",
    "weft.zeros(6, 2, mesh=mesh, sharding=P('dp')) + good",
    "weft.ones((6, 2), partition_spec=LAYOUT) * good",
]
"""The names that torch, JAX and torch_xla have for the same arguments."""


def test_names_of_other_libraries() -> None:
    def on_rank(mesh: Any) -> None:
        good = weft.distribute_tensor(FULL, mesh, P("dp"))
        names = {**globals(), "mesh": mesh, "good": good, "local": good.to_local(),
                 "LAYOUT": Layout(mesh, (6, 2), P("dp"))}
        for text in SAME:
            assert same(good, eval(text, names)), text
        sums: Any = collectives.psum
        assert sums(torch.ones(1), axis_name="dp", mesh=mesh).item() == 2
        made: Any = weft.init_mesh
        assert made(mesh_shape=(2,), axis_names=("dp",)) is made({"dp": 2})

    weft.testing.run(on_rank, world_size=2, mesh={"dp": 2})  # type: ignore[call-arg]


def test_values_by_other_names() -> None:
    mesh: Any = Mesh({"dp": 2}, devices=[0, 1])  # type: ignore[call-arg]
    lies = Layout(mesh, (6, 2), P("dp"))
    assert lies == Layout(device_mesh=mesh, global_shape=(6, 2), spec=P("dp"))  # type: ignore
    assert spmd.Mesh([0, 1], (2,), mesh_dim_names=("dp",)).abstract == mesh  # type: ignore


FIXES: dict[str, str] = {
    "weft.distribute_tensor(FULL, mesh, P('dp'), sizes={0: (2, 4)})":
        'placements=Layout(mesh, shape, P("dp"), sizes={0: (5, 3)})',
    "weft.distribute_tensor(FULL, mesh, dtype=torch.float64)":
        "distribute_tensor(tensor.to(dtype), ...)",
    "weft.distribute_tensor(FULL, mesh, requires_grad=True)":
        "distribute_tensor(...).requires_grad_()",
    "weft.distribute_tensor(FULL, mesh, placement=P('dp'))":
        "distribute_tensor(..., placements=...)",
    "weft.ones(6, 2, mesh=mesh, layout=P('dp'))": "weft.ones(..., placements=...)",
    "weft.ones(size=(6, 2), mesh=mesh)": "lengths come first, without a name: (8, 4, ...)",
    "weft.ones(6, mesh=mesh, sizes={0: (2, 4)})":
        'placements=Layout(mesh, shape, P("dp"), sizes={0: (5, 3)})',
    "weft.init_mesh({'dp': 2}, devices=[0, 1])":
        'weft.init_mesh({"dp": 2, "tp": 2}, ranks=[0, 2, 1, 3])',
    "weft.distribute_module(nn.Linear(2, 2), mesh, specs={})":
        'shardings={"*.weight": P("tp")}',
    "weft.nn.ColwiseParallel(use_local_output=False)":
        "x.to_local() where the block of a result is wanted",
    "Mesh((2,), mesh_dim_names=('dp',))": 'Mesh({"dp": 2, "tp": 4})',
    "Mesh(dp=2, tp=4)": 'Mesh({"dp": 2, "tp": 4})',
    "P(dp=0)": 'P("dp"): the axis of each dim, in order',
    "P('dp', unreduced={'tp'})": 'P("dp", partial={"tp": "sum"})',
    "collectives.all_gather(FULL, 'dp', axis=0)":
        "dim=0; blocks are joined unless tiled=False, which is JAX's default",
    "spmd.mark_sharding(FULL, ('dp', None), mesh)": "P('dp', None), after the mesh",
    "weft.testing.run(len, n=2)": "one of these names",
}


def test_names_that_mean_something_else_say_what_to_write() -> None:
    def on_rank(mesh: Any) -> None:
        for text, fix in FIXES.items():
            with pytest.raises(ShardTypeError) as error:
                eval(text, {**globals(), "mesh": mesh})
            assert str(error.value).splitlines()[-1] == f"  Fix: {fix}", text

    weft.testing.run(on_rank, mesh={"dp": 2})


def test_an_unknown_name_in_five_parts() -> None:
    with pytest.raises(ShardTypeError) as error:
        weft.nn.report(nn.Linear(4, 2), meshes=Mesh({"tp": 2}), rows=3)  # type: ignore[call-arg]
    assert str(error.value) == """\
report(meshes=, rows=): 2 named arguments are none of its 4.
  Rule: it takes module, mesh, shardings, activations.
  Offenders: meshes, rows
  Fix: report(..., mesh=...)"""


UNKNOWN_AXES: dict[str, str] = {
    "weft.distribute_tensor(FULL, mesh, P('up'))": "distribute_tensor(placements=P('up'))",
    "weft.ones(6, mesh=mesh, spec=P('up'))": "weft.ones(placements=P('up'))",
    "ShardTensor.from_local(FULL, mesh, P('up'))": "from_local(placements=P('up'))",
    "weft.ones(6, mesh=mesh).redistribute(P('up'))": "redistribute(placements=P('up'))",
    "weft.ones(6, mesh=mesh).to_local(grad_placements=P('up'))":
        "to_local(grad_placements=P('up'))",
    "weft.scatter_tensor(FULL, 0, mesh, P('up'))": "scatter_tensor(placements=P('up'))",
    "weft.plan(weft.ones(6, mesh=mesh), P('up'))": "plan(dst=P('up'))",
    "weft.distribute_module(nn.Linear(2, 2), mesh, shardings={'*': P('up')})":
        "distribute_module(shardings=P('up'))",
    "weft.local_map(len, in_specs=P('up'), mesh=mesh)(FULL)": "local_map(len)(in_specs=P('up'))",
    "weft.reshard({'x': weft.ones(6, mesh=mesh)}, mesh, {'x': P('up')})":
        "reshard(shardings=P('up'))",
    "spmd.mark_sharding(FULL, mesh, ('up',))": "mark_sharding(partition_spec=P('up'))",
    "spmd.ShardingSpec(mesh, ('up',))": "ShardingSpec(partition_spec=P('up'))",
}


def test_an_unknown_axis_is_told_in_the_name_of_the_call() -> None:
    def on_rank(mesh: Any) -> None:
        for text, call in UNKNOWN_AXES.items():
            with pytest.raises(MeshError) as error:
                eval(text, {**globals(), "mesh": mesh})
            assert str(error.value).startswith(f"{call}: 'up' is no axis of Mesh"), text

    weft.testing.run(on_rank, mesh={"dp": 2})


def test_a_plan_of_a_tensor_takes_its_dtype() -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.zeros(6, 2, dtype=torch.float64, mesh=mesh, spec=P("dp"))
        due = Layout(mesh, (6, 2), P())
        assert weft.plan(x, P()) is weft.plan(x.sharding, due, itemsize=8)
        assert weft.plan(x, x.redistribute(P()), itemsize=2) is weft.plan(x.sharding, due, 2)

    weft.testing.run(on_rank, mesh={"dp": 2})


def test_names_of_functions_elsewhere_lead_to_names_that_exist() -> None:
    for name, code in COUNTERPARTS.items():
        assert not hasattr(weft, name)
        for found in re.findall(r"\bweft((?:\.\w+)+)", code):
            operator.attrgetter(found[1:])(weft)
    with pytest.raises(AttributeError, match=r"; it is weft\.spmd\.mark_sharding$"):
        weft.mark_sharding  # noqa: B018
    for room in ("weft", "weft.nn", "weft.spmd"):
        with pytest.raises(ImportError, match=r"; in its place: weft\.distribute_module\("):
            exec(f"from {room} import parallelize_module")
    with pytest.raises(AttributeError, match=r"^module 'weft\.random' .*manual_seed\(0\)"):
        weft.random.OffsetBasedRNGTracker  # noqa: B018
    with pytest.raises(AttributeError, match=r"^module 'weft\.nn' has no attribute 'nobody_s'$"):
        weft.nn.nobody_s  # noqa: B018
    mesh: Any = weft.testing.run(lambda mesh: mesh, mesh={"dp": 1, "tp": 1})[0]
    with pytest.raises(AttributeError, match=r"^'BoundMesh' .*'_flatten'; in its place: P\(\("):
        mesh._flatten("all")
    with pytest.raises(AttributeError, match=r"; in its place: mesh\.device_mesh, which DTensor's"):
        DTensor.from_local(FULL, mesh)
    with pytest.raises(ImportError, match=r"; it is weft\.collectives\.psum$"):
        exec("from weft import psum")


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
