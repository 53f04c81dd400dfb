"""Bound meshes: identity, coordinates, slices, defaults, and the recording body."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from weft.comm import (
    BoundMesh,
    Recorded,
    RecordingWorld,
    as_bound_mesh,
    current_mesh,
    init_mesh,
    recorded,
    run_simulated,
)
from weft.core import Layout, Mesh, P
from weft.errors import MeshError, ShardTypeError

AXES = {"dp": 2, "cp": 3, "tp": 2}


def test_a_bound_mesh_equals_its_value_and_layouts_hold_the_value() -> None:
    def fn(mesh):
        value = Mesh(AXES)
        assert mesh == value
        assert value == mesh
        assert hash(mesh) == hash(value)
        assert type(mesh.abstract) is Mesh
        layout = Layout(mesh, (4, 4), P("dp"))
        assert layout == Layout(value, (4, 4), P("dp"))
        assert type(layout.mesh) is Mesh
        assert repr(mesh) == repr(value)

    run_simulated(fn, mesh=AXES)


def test_one_object_per_rank_and_value() -> None:
    def fn(mesh):
        assert init_mesh(AXES) is mesh
        assert init_mesh(Mesh(AXES)) is mesh
        assert as_bound_mesh(Mesh(AXES)) is mesh
        assert as_bound_mesh(mesh) is mesh
        assert init_mesh(AXES, device_type="meta") is not mesh
        assert mesh["cp"] is mesh["cp"]
        assert mesh["dp", "cp", "tp"] is mesh
        assert mesh.comm((0, 2)) is mesh.comm((2, 0)) is mesh.comm((0, -1))
        assert copy.copy(mesh) is copy.deepcopy(mesh) is mesh
        assert pickle.loads(pickle.dumps(mesh)) == mesh.abstract
        return mesh

    assert len({id(mesh) for mesh in run_simulated(fn, mesh=AXES)}) == 12


def test_methods_of_a_device_mesh() -> None:
    def fn(mesh):
        rank = mesh.rank
        assert mesh.get_coordinate() == mesh.here == (rank // 6, rank // 2 % 3, rank % 2)
        assert (mesh.size(), mesh.size(1), mesh.size("cp"), mesh.ndim) == (12, 3, 3, 3)
        assert (mesh.shape, mesh.mesh_dim_names) == ((2, 3, 2), ("dp", "cp", "tp"))
        assert [mesh.get_local_rank(axis) for axis in ("dp", 1, -1)] == list(mesh.here)
        assert (mesh.get_rank(), mesh.device_type) == (rank, "cpu")
        assert mesh.mesh.tolist() == torch.arange(12).view(2, 3, 2).tolist()
        assert mesh["cp"].get_local_rank() == mesh.here[1]
        with pytest.raises(MeshError, match=r'Fix: mesh.get_local_rank\(\'dp\'\)'):
            mesh.get_local_rank()
        with pytest.raises(MeshError, match=r"no process groups(.|\n)*mesh.comm"):
            mesh.get_group("dp")
        with pytest.raises(MeshError, match="no process groups"):
            _ = mesh.device_mesh

    run_simulated(fn, mesh=AXES)


def test_slices_share_the_other_coordinates() -> None:
    def fn(mesh):
        dp, cp, tp = mesh.here
        assert mesh["cp"] == Mesh({"cp": 3}, [6 * dp + 2 * c + tp for c in range(3)])
        assert mesh["tp", "dp"] == Mesh(
            {"tp": 2, "dp": 2}, [6 * d + 2 * cp + t for t in range(2) for d in range(2)]
        )
        assert mesh["tp", "dp"].here == (tp, dp)
        assert mesh["tp", "dp"]["dp"] == mesh["dp"]
        assert mesh["cp"].comm((0,)).exchange(mesh.rank) == list(mesh.comm((1,)).ranks)
        with pytest.raises(MeshError, match="names each axis once"):
            _ = mesh["tp", "tp"]
        with pytest.raises(MeshError, match="Offenders: 'sp'"):
            _ = mesh["sp"]

    run_simulated(fn, mesh=AXES)


def test_communicators_stand_in_mesh_order() -> None:
    ranks = (5, 0, 3, 1)

    def fn(mesh):
        if mesh.here is None:
            assert mesh.rank in (2, 4)
            with pytest.raises(MeshError, match=f"rank {mesh.rank} is outside"):
                mesh.comm((0,))
            with pytest.raises(MeshError, match="outside"):
                mesh.get_local_rank("dp")
            assert mesh["tp"].here is None
            return None
        assert mesh.comm((0, 1)).ranks == ranks
        assert mesh.comm((1, 0)).exchange(mesh.rank) == list(ranks)
        assert mesh.comm((0,)).index == mesh.here[0]
        assert mesh.comm((0,)).axes == ("dp",)
        return mesh.here

    assert run_simulated(fn, 6, Mesh({"dp": 2, "tp": 2}, ranks)) == [
        (0, 1), (1, 1), None, (1, 0), None, (0, 0),
    ]


def test_the_default_mesh_nests_and_is_the_threads_own() -> None:
    def fn(mesh):
        assert current_mesh() is None
        with mesh:
            assert as_bound_mesh(None) is mesh
            mesh.comm((0, 1, 2)).exchange(None)
            assert current_mesh() is mesh
            with mesh["tp"] as inner:
                assert current_mesh() is inner
            with pytest.raises(KeyError), inner:
                raise KeyError
            assert current_mesh() is mesh
        with pytest.raises(MeshError, match="no default mesh"):
            as_bound_mesh(None)

    run_simulated(fn, mesh=AXES)


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(ShardTypeError) as caught:
        as_bound_mesh([2, 2], "redistribute(device_mesh)")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "redistribute(device_mesh): [2, 2] is of type list.\n"
        "  Rule: a mesh is a weft mesh, or a torch DeviceMesh while torch.distributed runs.\n"
        "  Offenders: [2, 2]\n"
        '  Fix: weft.init_mesh({"dp": 2, "tp": 2})'
    )


def test_a_world_of_one_rank_needs_nothing() -> None:
    mesh = init_mesh({"dp": 1, "tp": 1})
    assert isinstance(mesh, BoundMesh)
    assert (mesh.here, mesh.rank, mesh.size()) == ((0, 0), 0, 1)
    comm, x = mesh.comm((0, 1)), torch.arange(3.0)
    results = [
        comm.all_reduce(x, "avg"), comm.all_gather(x, (3,)), comm.reduce_scatter(x, (3,), "max"),
        comm.all_to_all(x, (3,), (3,)), comm.broadcast(x, 0), comm.scatter(x, (3,), 0, x.dtype),
    ]
    for result in results:
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()
    assert comm.exchange("me") == ["me"]


def test_a_mesh_larger_than_the_world_is_refused() -> None:
    with pytest.raises(MeshError) as caught:
        init_mesh({"dp": 2, "tp": 2})
    assert str(caught.value) == (
        "init_mesh(axes): Mesh({'dp': 2, 'tp': 2}) needs 4 ranks up to rank 3, the world has 1.\n"
        "  Rule: a mesh lies within the world: the simulated ranks of weft.testing.run, or the "
        "processes of torch.distributed or torchrun, or else this process alone.\n"
        "  Offenders: 1, 2, 3\n"
        "  Fix: weft run -n 4 script.py, or in one process:\n"
        "       weft.testing.run(fn, num_ranks=4, mesh={'dp': 2, 'tp': 2})"
    )
    with pytest.raises(MeshError, match="Offenders: 7"):
        init_mesh({"x": 1}, ranks=[7])


@pytest.mark.parametrize("wrong", ["gpu", "cuda:0"])
def test_what_is_no_type_of_device(wrong: str) -> None:
    with pytest.raises(ShardTypeError) as caught:
        init_mesh({"dp": 1}, wrong)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"init_mesh(device_type): {wrong!r} is no type of device."
    assert lines[-1] == "  Fix: weft.init_mesh(axes, 'cuda')"


@pytest.mark.parametrize(("sizes", "given", "fix"), [
    ((2, 3), ("a", "b"), "{'a': 2, 'b': 3}"), (6, ["a"], "{'a': 6}"),
    ({"a": 6}, 5, "{'dp': 2, 'tp': 2}"), ((2, 3), range(2), "{'dp': 2, 'tp': 2}"),
])
def test_names_in_place_of_a_type_of_device(sizes: Any, given: Any, fix: str) -> None:
    with pytest.raises(ShardTypeError) as caught:
        init_mesh(sizes, given)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"init_mesh(device_type): it is {given!r}, of type ")
    assert lines[-1] == f"  Fix: weft.init_mesh({fix})"


def test_a_size_that_is_left_out() -> None:
    def fn(mesh):
        assert init_mesh({"dp": -1, "tp": 2}) == Mesh({"dp": 3, "tp": 2})
        assert init_mesh((2, -1), mesh_dim_names=("dp", "tp")) == Mesh({"dp": 2, "tp": 3})
        assert init_mesh(-1).size() == 6
        assert init_mesh({"x": -1}, ranks=range(2)).size() == 2
        with pytest.raises(MeshError) as caught:
            init_mesh({"dp": -1, "tp": 4})
        assert str(caught.value) == (
            "init_mesh(axes): axes is {'dp': -1, 'tp': 4}: the sizes that are given make 4, and "
            "there are 6 ranks.\n"
            "  Rule: the size that is left out takes all ranks that the others leave.\n"
            "  Offenders: 6 ranks by 4\n"
            "  Fix: sizes that divide the number of ranks"
        )
        with pytest.raises(MeshError, match=r"^init_mesh\(axes\): 2 sizes of \(-1, -1, 2\) are -1"):
            init_mesh((-1, -1, 2))
        for wrong in ({"dp": -1, "tp": 0}, (-2,)):
            with pytest.raises(MeshError, match="at least one device"):
                init_mesh(wrong)

    run_simulated(fn, num_ranks=6)


def test_recording_counts_what_one_rank_of_many_receives() -> None:
    value = Mesh({"dp": 1000, "tp": 8})
    mesh = RecordingWorld(1234, value).bind(value, "meta")
    assert mesh.here == (154, 2)
    dp, tp = mesh.comm((0,)), mesh.comm((1,))
    assert (dp.size, tp.size, mesh.comm((0, 1)).size) == (1000, 8, 8000)

    def zeros(count):
        return torch.empty(count, dtype=torch.float32, device="meta")

    shapes = [
        dp.all_reduce(zeros(500).view(50, 10), "sum").shape,
        tp.all_gather(zeros(3), (1, 2, 3, 4, 5, 6, 7, 8)).shape,
        tp.reduce_scatter(zeros(36), (1, 2, 3, 4, 5, 6, 7, 8), "sum").shape,
        tp.all_to_all(zeros(16), (2,) * 8, (1, 2, 3, 4, 5, 6, 7, 8)).shape,
        tp.broadcast(zeros(6).view(2, 3), 0).shape,
        tp.broadcast(zeros(6).view(2, 3), 2).shape,
        mesh["tp"].comm((0,)).scatter(None, (5,) * 8, 0, torch.float64).shape,
    ]
    assert shapes == [(50, 10), (36,), (3,), (36,), (2, 3), (2, 3), (5,)]
    assert recorded(mesh) == [
        Recorded("all_reduce", ("dp",), 2 * 2000 * 999 // 1000),
        Recorded("all_gather", ("tp",), 33 * 4),
        Recorded("reduce_scatter", ("tp",), 7 * 3 * 4),
        Recorded("all_to_all", ("tp",), 33 * 4),
        Recorded("broadcast", ("tp",), 24),
        Recorded("broadcast", ("tp",), 0),
        Recorded("all_to_all", ("tp",), 40),
    ]
    assert tp.exchange("value") == ["value"] * 8
    alone = RecordingWorld(0, Mesh((2,))).bind(Mesh((2,)), "cpu")
    assert torch.equal(alone.comm((0,)).all_reduce(torch.ones(2), "sum"), torch.zeros(2))


def test_a_line_has_its_ranks_in_the_order_of_its_axes() -> None:
    """As the shards of a dim over `("b", "a")`; the others are in the order of the mesh."""

    def on_rank(mesh: BoundMesh) -> Any:
        line = mesh.line((2, 1))
        found = line.all_gather(torch.tensor([mesh.rank]), [1] * line.size)
        assert tuple(found.tolist()) == line.ranks and line.ranks[line.index] == mesh.rank
        assert mesh.line((1, 2)) is mesh.comm((1, 2)) is mesh.comm((2, 1))
        assert mesh.line((2, 1)) is line and mesh.line((0,)) is mesh.comm((0,))
        return line.ranks

    found = run_simulated(on_rank, 12, {"x": 2, "a": 2, "b": 3})
    assert found == [(0, 3, 1, 4, 2, 5)] * 6 + [(6, 9, 7, 10, 8, 11)] * 6
