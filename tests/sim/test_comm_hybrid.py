"""Meshes over two networks, from hosts that are told or asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weft
from weft import MeshError
from weft.spmd import HybridMesh


def ranks_of(mesh: Any) -> list[int]:
    return [mesh.rank_at(place) for place in range(mesh.size())]


@pytest.mark.parametrize(("fast", "slow", "more", "axes", "ranks"), [
    ({"tp": 4}, {"dp": 2}, {}, {"dp": 2, "tp": 4}, list(range(8))),
    ({"tp": 4}, {"dp": 2}, {"hosts": [0, 1] * 4}, {"dp": 2, "tp": 4}, [0, 2, 4, 6, 1, 3, 5, 7]),
    ({"dp": 2, "tp": 2}, {"dp": 2}, {}, {"dp": 4, "tp": 2}, list(range(8))),
    ({"dp": 2, "tp": 2}, {"tp": 2}, {}, {"dp": 2, "tp": 4}, [0, 1, 4, 5, 2, 3, 6, 7]),
    ({"a": 2, "b": 4}, None, {"torus": (4, 2)}, {"a": 2, "b": 4}, [0, 2, 4, 6, 1, 3, 5, 7]),
    ({"a": 2, "b": 2, "c": 2}, {}, {"torus": (4, 2), "split": True}, {"a": 2, "b": 2, "c": 2},
     [0, 1, 2, 3, 4, 5, 6, 7]),
    ({"a": 4}, {"b": 2}, {"coordinates": [(1,), (0,), (3,), (2,)] * 2}, {"b": 2, "a": 4},
     [1, 0, 3, 2, 5, 4, 7, 6]),
    ({"tp": 4}, {"dp": 2}, {"hosts": [1, 0] * 4}, {"dp": 2, "tp": 4}, [1, 3, 5, 7, 0, 2, 4, 6]),
    ({"tp": 2}, {"dp": 4}, {"hosts": np.array([10, 9, 2, 0, 2, 0, 9, 10])}, {"dp": 4, "tp": 2},
     [3, 5, 2, 4, 1, 6, 0, 7]),
    ({"tp": 4}, {"dp": 2}, {"hosts": "babababa"}, {"dp": 2, "tp": 4}, [0, 2, 4, 6, 1, 3, 5, 7]),
])
def test_which_rank_stands_where(
    fast: Any, slow: Any, more: Any, axes: Any, ranks: list[int]
) -> None:
    def on_rank(_: Any) -> None:
        mesh = weft.hybrid_mesh(fast, slow, **more)
        assert mesh == weft.Mesh(axes, ranks=ranks)
        x = weft.ones(8, mesh=mesh, spec=weft.P(tuple(axes)))
        assert x.sum().item() == 8

    weft.testing.run(on_rank, 8)


def test_by_torch_xla_s_name() -> None:
    def on_rank(_: Any) -> list[int]:
        mesh = HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), axis_names=("x", "y"))
        assert dict(mesh.shape()) == {"x": 4, "y": 2}
        return mesh.get_logical_mesh().tolist()

    assert weft.testing.run(on_rank, 8) == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 8


def test_slices_stand_in_the_order_of_their_indices() -> None:
    """As JAX and torch_xla sort the granules of devices by slice_index."""
    def on_rank(_: Any) -> list[int]:
        hosts = [3, 3, 1, 1, 0, 0, 2, 2]
        mesh = HybridMesh(ici_mesh_shape=(1, 2), dcn_mesh_shape=(2, 2), hosts=hosts)
        return mesh.get_logical_mesh().tolist()

    assert weft.testing.run(on_rank, 8) == [[[4, 5, 2, 3], [6, 7, 0, 1]]] * 8


@pytest.mark.parametrize(("call", "said"), [
    (lambda: weft.hybrid_mesh({"a": 3}, {"b": 2}), "hybrid_mesh: fast (1, 3) times slow (2, 1)"),
    (lambda: weft.hybrid_mesh({"a": 4}, {"b": 2}, hosts=[0, 0, 0, 1, 1, 1, 2, 2]),
     "hybrid_mesh: 3 hosts have [2, 3, 3] ranks; the slow lengths make 2 blocks of 4."),
    (lambda: weft.hybrid_mesh({"a": 4}, {"b": 2}, hosts=[0]), "hybrid_mesh(hosts=): 1 hosts are"),
    (lambda: weft.hybrid_mesh({"a": 8}, torus=(4, 4)), "hybrid_mesh: 16 devices in a torus"),
    (lambda: HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2,)),
     "HybridMesh(dcn_mesh_shape=): it has 1 lengths"),
])
def test_what_does_not_fit(call: Any, said: str) -> None:
    def on_rank(_: Any) -> str:
        with pytest.raises(MeshError) as told:
            call()
        return str(told.value)

    texts = weft.testing.run(on_rank, 8)
    assert len(set(texts)) == 1 and texts[0].startswith(said)
