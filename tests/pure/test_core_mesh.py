"""Meshes as values: names, coordinates, devices, slices."""

from __future__ import annotations

import pickle
import time
from itertools import product

import pytest

from weft.core import Mesh, as_mesh
from weft.errors import MeshError, ShardTypeError


def test_named_and_numbered_axes():
    mesh = Mesh({"dp": 2, "tp": 4})
    assert (mesh.axis_names, mesh.shape, mesh.ndim, mesh.size()) == (("dp", "tp"), (2, 4), 2, 8)
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert [mesh.axis("tp"), mesh.axis(1), mesh.axis(-1)] == [1, 1, 1]
    assert (mesh.size("dp"), mesh.size(1)) == (2, 4)
    assert Mesh([("dp", 2), ("tp", 4)]) == mesh
    numbered = Mesh((2, 4))
    assert numbered.axis_names == (0, 1)
    assert numbered.mesh_dim_names is None
    assert numbered != mesh
    assert Mesh(8) == Mesh((8,)) == Mesh([8])
    assert (Mesh(()).size(), Mesh({}).ndim) == (1, 0)


@pytest.mark.parametrize("sizes", [(), (1,), (5,), (2, 3), (1, 2, 1), (3, 1, 2, 2)])
def test_positions_and_coordinates_count_row_major(sizes: tuple[int, ...]):
    mesh = Mesh(sizes)
    for position, coordinate in enumerate(product(*map(range, sizes))):
        assert mesh.coordinate(position) == coordinate
        assert mesh.position(coordinate) == position


def test_ranks_in_any_order_and_any_subset():
    mesh = Mesh({"dp": 2, "tp": 2}, ranks=[7, 3, 9, 0])
    assert [mesh.rank_at(place) for place in range(4)] == [7, 3, 9, 0]
    assert [mesh.position_of_rank(rank) for rank in (9, 0, 1)] == [2, 3, None]
    assert Mesh((2, 2), ranks=[0, 1, 2, 3]) == Mesh((2, 2))
    assert Mesh((2, 2), ranks=[0, 1, 3, 2]) != Mesh((2, 2))
    assert Mesh((2, 2)).position_of_rank(4) is None
    assert Mesh((2, 2)).position_of_rank(-1) is None


def test_equality_and_hash_are_of_names_sizes_and_ranks():
    variants = [
        Mesh({"a": 2, "b": 3}), Mesh({"b": 3, "a": 2}), Mesh({"a": 3, "b": 2}), Mesh((2, 3)),
        Mesh({"a": 2, "b": 3}, ranks=[1, 0, 2, 3, 4, 5]), Mesh({"a": 6}),
    ]
    assert len(set(variants)) == len(variants)
    for mesh in variants:
        same = pickle.loads(pickle.dumps(mesh))
        assert same == mesh
        assert hash(same) == hash(mesh)
        assert eval(repr(mesh)) == mesh
    assert Mesh((2,)) != (2,)


def test_a_slice_is_the_mesh_of_those_axes_through_a_device():
    mesh = Mesh({"dp": 2, "cp": 3, "tp": 4})
    assert mesh["tp"] == Mesh({"tp": 4})
    assert mesh["cp", "tp"] == Mesh({"cp": 3, "tp": 4})
    assert mesh["dp"] == Mesh({"dp": 2}, ranks=(0, 12))
    assert mesh["tp", "dp"].ranks == (0, 12, 1, 13, 2, 14, 3, 15)
    assert mesh.submesh(("cp",), at=(1, 2, 3)) == Mesh({"cp": 3}, ranks=(15, 19, 23))
    assert mesh["dp", "cp", "tp"] == mesh
    assert Mesh((2, 4))[1] == Mesh((4,))
    shuffled = Mesh({"dp": 2, "tp": 2}, ranks=(5, 4, 1, 0))
    assert shuffled["dp"].ranks == (5, 1)
    assert shuffled["tp", "dp"].ranks == (5, 1, 4, 0)


@pytest.mark.parametrize("names", [("x",), ("dp", "dp"), ("dp", 0), (2,), (True,)])
def test_a_slice_refuses_unknown_and_repeated_axes(names: tuple[object, ...]):
    with pytest.raises(MeshError):
        Mesh({"dp": 2, "tp": 4})[names]  # type: ignore[index]


@pytest.mark.parametrize("name", ["", " ", "a b", "a,b", "a@b", "(a)", "1", "[a]"])
def test_names_that_would_garble_a_layouts_text_are_refused(name: str):
    with pytest.raises(MeshError, match="axis names"):
        Mesh({name: 2})


@pytest.mark.parametrize("name", ["dp", "dp_shard", "dp-shard", "host.gpu", "a:b", "Ω"])
def test_names_that_torch_users_have(name: str):
    assert Mesh({name: 2}).axis_names == (name,)


@pytest.mark.parametrize(
    "axes", [{"dp": 2.0}, {"dp": "2"}, {"dp": True}, "dp", None, [("a", 1), 2]]
)
def test_sizes_are_whole_numbers(axes: object):
    with pytest.raises(ShardTypeError):
        Mesh(axes)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, -1], range(1, 4)])
def test_ranks_are_different_and_as_many_as_the_mesh(ranks: list[int]):
    with pytest.raises(MeshError, match=r"Mesh\(ranks=\)"):
        Mesh((2, 2), ranks=ranks)


def test_a_huge_mesh_lists_no_devices():
    start = time.process_time()
    mesh = Mesh({"a": 10**6, "b": 10**6}, ranks=range(10**12))
    assert mesh.ranks is None
    assert mesh["b"].ranks is None
    assert mesh.coordinate(10**12 - 1) == (10**6 - 1, 10**6 - 1)
    assert mesh.position_of_rank(10**11) == 10**11
    assert time.process_time() - start < 0.5  # a list of the devices would take hours


def test_repeated_ranks_are_found_in_linear_time():
    start = time.process_time()
    with pytest.raises(MeshError, match="7 2 times"):
        Mesh((100_001,), ranks=[*range(100_000), 7])
    assert time.process_time() - start < 5


def test_as_mesh_refuses_what_is_no_mesh():
    assert as_mesh(Mesh((2,))) == Mesh((2,))
    with pytest.raises(ShardTypeError, match="DeviceMesh"):
        as_mesh("dp")
