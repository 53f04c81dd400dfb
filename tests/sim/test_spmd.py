"""Meshes, marks and manual regions by torch_xla's names."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
import tracemalloc
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import weft
from tests.harness import ranks
from weft import (
    LayoutError,
    MeshError,
    P,
    PlacementError,
    ShardTensor,
    ShardTypeError,
    UnsupportedOpError,
    spmd,
)
from weft.spmd import Mesh, ShardingType

X = torch.arange(42.0, dtype=torch.float64).view(7, 6)


def test_a_mesh_of_some_devices_in_any_order() -> None:
    mesh = Mesh(np.array([[5, 3, 1], [0, 2, 4]]), (3, 2), ("x", "y"))
    assert dict(mesh.shape()) == {"x": 3, "y": 2} and mesh.size() == 6
    assert mesh.get_logical_mesh().tolist() == [[5, 3], [1, 0], [2, 4]]
    assert mesh.device_ids.tolist() == [5, 3, 1, 0, 2, 4]
    assert (mesh.get_axis_name_idx("y"), mesh.get_axis_name_idx("z")) == (1, None)
    assert mesh == weft.Mesh({"x": 3, "y": 2}, ranks=(5, 3, 1, 0, 2, 4))
    assert dict(Mesh(range(4), (2, 2)).shape()) == {0: 2, 1: 2}
    assert mesh.mesh_shape == (3, 2) and copy.deepcopy(mesh).mesh_shape == (3, 2)
    assert pickle.loads(pickle.dumps(mesh)) == mesh


def test_a_hybrid_mesh_tells_its_shapes() -> None:
    def on_rank(_: Any) -> list[Any]:
        mesh = spmd.HybridMesh(ici_mesh_shape=[1, 2], dcn_mesh_shape=[2, 1], hosts="aabb")
        flat = spmd.HybridMesh(ici_mesh_shape=(2, 2))
        return [[one.mesh_shape, one.ici_mesh_shape, one.dcn_mesh_shape]
                for one in (mesh, flat, copy.deepcopy(mesh))]

    due = [(2, 2), (1, 2), (2, 1)]
    assert weft.testing.run(on_rank, 4) == [[due, [(2, 2), (2, 2), (1, 1)], due]] * 4


def test_kinds_have_the_numbers_of_torch_xla() -> None:
    assert [(kind.name, kind.value) for kind in ShardingType] == list(zip(
        ["REPLICATED", "MAXIMAL", "TUPLE", "TILED", "MANUAL", "PARTIAL", "UNKNOWN"], range(7)))


@pytest.mark.parametrize(("spec", "kind", "tiles", "groups", "text"), [
    (("x", None), ShardingType.PARTIAL, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]],
     [[0, 1, 2, 3], [4, 5, 6, 7]], "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"),
    ((1, 0), ShardingType.TILED, [[0, 4], [1, 5], [2, 6], [3, 7]],
     [[0], [4], [1], [5], [2], [6], [3], [7]], "{devices=[4,2]<=[2,4]T(1,0)}"),
    ((("y", "x"),), ShardingType.TILED, [0, 4, 1, 5, 2, 6, 3, 7],
     [[0], [4], [1], [5], [2], [6], [3], [7]], "{devices=[8]<=[2,4]T(1,0)}"),
    ((None, None, None), ShardingType.REPLICATED, [], [list(range(8))], "{replicated}"),
])
def test_what_a_spec_means_to_xla(
    spec: Any, kind: ShardingType, tiles: Any, groups: Any, text: str
) -> None:
    found = Mesh(range(8), (2, 4), ("x", "y")).get_op_sharding(spec)
    assert (found.type, found.tile_assignment, found.replication_groups) == (kind, tiles, groups)
    assert str(found) == text
    flat = np.array(found.group_assignment).reshape(-1).tolist()
    assert flat == (list(range(len(groups))) if len(groups) > 1 else [])


def test_devices_in_any_order_are_printed() -> None:
    """As XLA prints them: a list, where they are no iota."""
    mesh = Mesh([3, 1, 0, 2], (2, 2), ("x", "y"))
    assert str(mesh.get_op_sharding(("x", None))) == (
        "{devices=[2,1,2]3,1,0,2 last_tile_dim_replicate}"
    )
    with pytest.raises(PlacementError, match="no transposed iota"):
        mesh.get_op_sharding(("x", None)).text(2)


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Mesh([0, 1, 1, 2], (2, 2)), "4 device ids, 3 of them different, for a mesh of 4"),
    (lambda: Mesh([0, 1, 2], (2, 2)), "3 device ids, 3 of them different, for a mesh of 4"),
    (lambda: Mesh(range(4), (2, 2), ("x",)), "there are 1 names for 2 axes"),
    (lambda: Mesh(range(4), (2, 2), ("x", "x")), "Mesh"),
    (lambda: Mesh(range(4), (2, 2), ("x", "y")).get_op_sharding(("z", None)), "'z'"),
])
def test_bad_meshes(make: Any, said: str) -> None:
    with pytest.raises(MeshError, match=said.replace("(", r"\(")):
        make()


def test_global_meshes() -> None:
    def on_rank(_: Any) -> str:
        row = spmd.get_1d_mesh("data")
        assert spmd.get_global_mesh() is None
        with pytest.raises(MeshError, match="no mesh is given, and there is no default mesh"):
            spmd.mark_sharding(X, None, ("data",))
        spmd.set_global_mesh(row)
        assert spmd.get_global_mesh() is row
        assert weft.current_mesh() is None and weft.zeros(3, 2).device_mesh == row
        with weft.init_mesh({"other": 3}) as inner:  # `with` goes before
            assert spmd.mark_sharding(X, None, ("other",)).device_mesh is inner
        spmd.set_global_mesh(None)
        with pytest.raises(MeshError, match="no default mesh"):
            weft.zeros(3)
        spmd.set_global_mesh(row)
        return str(spmd.mark_sharding(X, None, ("data",)).sharding)

    assert weft.testing.run(on_rank, 3) == ["[7@data, 6]"] * 3


def test_the_global_mesh_is_the_process_s_and_each_simulated_rank_s_own() -> None:
    def on_rank(mesh: Any) -> Any:
        assert spmd.get_global_mesh() is None
        mesh.comm((0,)).exchange(None)
        mine = Mesh([mesh.rank], (1,), ("own",))
        spmd.set_global_mesh(mine)
        mesh.comm((0,)).exchange(None)
        assert spmd.get_global_mesh() is mine
        return weft.ones(2).device_mesh.ranks

    alone = Mesh([0], (1,), ("alone",))
    spmd.set_global_mesh(alone)
    try:
        assert weft.testing.run(on_rank, 3) == [None, (1,), (2,)]
        assert spmd.get_global_mesh() is alone
        seen: list[Any] = []

        def elsewhere() -> None:
            seen.extend([spmd.get_global_mesh(), weft.ones(2).device_mesh])
            spmd.set_global_mesh(None)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert seen[0] is alone and seen[1] == alone
        assert spmd.get_global_mesh() is None
    finally:
        spmd.set_global_mesh(None)


@ranks(x=2, y=2)
def test_collectives_of_a_manual_region_take_the_global_mesh(mesh: Any) -> None:
    spmd.set_global_mesh(Mesh(range(4), (2, 2), ("x", "y")))
    block = spmd.enable_manual_sharding(X, ("x", None))
    total = weft.collectives.psum(block.sum(0), "x")
    torch.testing.assert_close(total, X.sum(0))
    assert weft.collectives.axis_size(("x", "y")) == 4
    assert weft.collectives.axis_index("y") == mesh.rank % 2
    doubled = weft.local_map(lambda x: x * 2, in_specs=P("x"), out_specs=P("x"))(X)
    torch.testing.assert_close(doubled.full_tensor(), 2 * X)
    y = spmd.disable_manual_sharding(block - total, ("x",), (7, 6))
    torch.testing.assert_close(y.full_tensor(), X - X.sum(0))


MESH = {"x": 2, "y": 2}


@ranks(**MESH)
def test_marks_place_values_and_gradients(mesh: Any) -> None:
    of_xla = Mesh(range(4), (2, 2), ("x", "y"))
    leaf = X.clone().requires_grad_()
    x = spmd.mark_sharding(leaf, of_xla, ("y",))
    assert isinstance(x, ShardTensor) and str(x.sharding) == "[7@y, 6]"
    y = spmd.mark_sharding_with_gradients(x * 2, mesh, (None, ("x", "y")))
    assert str(y.sharding) == "[7, 6@(x,y)]"
    y.retain_grad()
    (y * y).sum().backward()
    torch.testing.assert_close(leaf.grad, 8 * X)  # whole, on every rank
    assert y.grad.sharding == y.sharding
    assert spmd.sharding_type(y) is ShardingType.TILED
    assert spmd.sharding_spec(x) == "{devices=[2,1,2]<=[2,2]T(1,0) last_tile_dim_replicate}"
    assert spmd.sharding_type(leaf) is spmd.sharding_spec(leaf) is None
    torch.testing.assert_close(spmd.clear_sharding(y), 2 * X)
    assert spmd.clear_sharding(leaf) is leaf
    torch.testing.assert_close(spmd.global_tensor(x), X)


@ranks(**MESH)
def test_shard_as_and_wraps(mesh: Any) -> None:
    x = spmd.mark_sharding(X, mesh, ("x", "y"))
    for a, b in ((x, X + 1), (X + 1, x), (spmd.wrap_as_sharded_tensor(X, mesh), x),
                 (x.sum(0, keepdim=True).expand(7, 6), X)):
        one, other = spmd.shard_as(a, b)
        assert one.sharding == other.sharding and not one.sharding.is_partial
        torch.testing.assert_close(spmd.clear_sharding(one), spmd.clear_sharding(a))
        torch.testing.assert_close(spmd.clear_sharding(other), spmd.clear_sharding(b))
    trees = spmd.shard_as({"a": x, "b": [None, X]}, {"a": X + 1, "b": [None, x]})
    for tree in trees:
        assert tree["b"][0] is None
        assert tree["a"].sharding == tree["b"][1].sharding == x.sharding
    torch.testing.assert_close(spmd.clear_sharding(trees[1]["a"]), X + 1)
    assert spmd.wrap_as_sharded_tensor(x) is x and spmd.wrap_if_sharded(x) is x
    whole = spmd.unwrap_sharded_tensor(x)
    assert type(whole) is Tensor and torch.equal(whole, X)
    assert spmd.unwrap_sharded_tensor(X) is X
    weight: Any = spmd.mark_sharding(nn.Parameter(X.clone()), mesh, ("x",))
    (spmd.unwrap_sharded_tensor(weight) * X).sum().backward()  # a value, not in place
    assert type(weight) is ShardTensor
    torch.testing.assert_close(weight.grad.full_tensor(), X)


def test_local_shards() -> None:
    def on_rank(mesh: Any) -> int:
        x = spmd.mark_sharding(X, mesh, (None, "y"))
        (shard,) = spmd.local_shards(x)
        torch.testing.assert_close(X[shard.indices], shard.data)
        assert shard.rank == mesh.rank and shard.unpadded_data is shard.data
        y: Any = x * 1
        spmd.load_local_shards_(y, [shard.data * 3])
        torch.testing.assert_close(y.full_tensor(), 3 * X)
        return shard.replica_id

    assert weft.testing.run(on_rank, mesh=MESH) == [0, 0, 1, 1]


@pytest.mark.parametrize("spec", [P("x", "y"), P(("y", "x")), P(None, "y"), P(),
                                  P("x", partial={"y": "sum"})], ids=str)
@pytest.mark.parametrize("leaf", [False, True])
@ranks(**MESH)
def test_local_shards_are_a_snapshot_that_is_taken_back(mesh: Any, spec: P, leaf: bool) -> None:
    x = weft.distribute_tensor(X.clone(), mesh, spec).requires_grad_(leaf)
    shards = spmd.local_shards(x)
    with torch.no_grad():
        x.mul_(5)
    terms = shards[0].data.clone()
    for shard in shards:  # of before
        if not spec.partial:
            torch.testing.assert_close(shard.unpadded_data, X[shard.indices])
        shard.unpadded_data = shard.data * 2 + (0 if spec.partial else 1)
    torch.testing.assert_close(x.detach().full_tensor(), 5 * X)
    assert spmd.load_local_shards_(x, shards) is x
    due = 2 * X if spec.partial else 2 * X + 1
    torch.testing.assert_close(x.detach().full_tensor(), due)
    for shard in shards:
        shard.data = terms
    spmd.load_local_shards_(x, shards)
    torch.testing.assert_close(x.detach().full_tensor(), X)
    assert x.requires_grad is leaf and x.is_leaf
    for shard in shards:
        shard.unpadded_data = 0
    spmd.load_local_shards_(cast(weft.ShardTensor, x[:]), shards)  # a view's base is written to
    torch.testing.assert_close(x.detach().full_tensor(), 0 * X)


def test_shards_of_others_are_refused() -> None:
    def on_rank(mesh: Any) -> list[str]:
        x = spmd.mark_sharding(X, mesh, ("x",))
        y = spmd.mark_sharding(X.flip(0)[:6], mesh, ("x",))
        (mine,), (other,) = spmd.local_shards(x), spmd.local_shards(y)
        moved = dataclasses.replace(mine, indices=(slice(2, 9), slice(0, 6)))
        said = []
        wrong: Any = [], [mine, mine], [X], [moved], [other, mine], [3], [x]
        for shards in wrong:
            with pytest.raises((LayoutError, ShardTypeError)) as told:
                spmd.load_local_shards_(x, shards)
            said.append(str(told.value))
        torch.testing.assert_close(x.full_tensor(), X)
        part = spmd.mark_sharding(X, Mesh([1, 2], (2,)), (0,))
        shards = spmd.local_shards(part)
        assert len(shards) == (mesh.rank in (1, 2))
        spmd.load_local_shards_(part, shards)
        return said

    for said in weft.testing.run(on_rank, mesh=MESH):
        assert "0 blocks are given" in said[0] and "2 blocks are given" in said[1]
        assert "(7, 6)" in said[2] and "slice(2, 9, None)" in said[3]
        assert "there are int among them" in said[5] and "ShardTensor" in said[6]
        assert all("Offenders:" in one for one in said)


@ranks(**MESH)
def test_manual_regions(mesh: Any) -> None:
    spmd.set_global_mesh(mesh)
    x = spmd.mark_sharding(X, mesh, ("x",)).detach().requires_grad_()
    w = torch.ones(6, dtype=torch.float64).requires_grad_()
    block, all_of_w = (
        spmd.enable_manual_sharding(x, ("x", "y")), spmd.enable_manual_sharding(w, ("y",))
    )
    assert type(block) is Tensor and tuple(block.shape) == ((4, 3)[mesh.rank // 2], 3)
    y = spmd.disable_manual_sharding(block * all_of_w * 2, ("x", "y"), (7, 6))
    (y * y).sum().backward()
    torch.testing.assert_close(y.full_tensor(), 2 * X)
    torch.testing.assert_close(x.grad.full_tensor(), 8 * X)
    torch.testing.assert_close(w.grad, (8 * X * X).sum(0))


@pytest.mark.parametrize(("call", "kind", "said"), [
    (lambda m: spmd.mark_sharding(nn.LazyLinear(6).weight, m, ("x",)), UnsupportedOpError,
     "mark_sharding(t): t is a Parameter, and it has no shape yet."),
    (lambda m: spmd.mark_sharding(X, m, ("x", None, None)), PlacementError, ""),
    (lambda m: spmd.mark_sharding(X, m, ("x", "x")), PlacementError, ""),
    (lambda m: spmd.mark_sharding(X, m, ("z",)), MeshError, ""),
    (lambda m: spmd.mark_sharding(X, m, (("x", ("y",)),)), ShardTypeError, ""),
    (lambda m: spmd.shard_as(X, X), ShardTypeError, "shard_as(a, b): both are plain tensors."),
    (lambda m: spmd.shard_as(spmd.mark_sharding(X, m, ("x",)), X[0]), LayoutError,
     "shard_as(a, b): a has shape (7, 6), b (6,)."),
    (lambda m: spmd.shard_as([X], [X, X]), LayoutError, "shard_as(a, b): a is "),
    (lambda m: spmd.disable_manual_sharding(spmd.mark_sharding(X, m, ("x",)), ("x",), (7, 6)),
     ShardTypeError, "disable_manual_sharding(t): t is a ShardTensor [7@x, 6]."),
    (lambda m: spmd.disable_manual_sharding(X, ("x",), (7, 6), mesh=m), LayoutError,
     "disable_manual_sharding(full_shape): it is (7, 6), and the blocks make up (14, 6)."),
])
def test_bad_input(call: Any, kind: type[Exception], said: str) -> None:
    def on_rank(mesh: Any) -> str:
        with pytest.raises(kind) as told:
            call(mesh)
        return str(told.value)

    texts = weft.testing.run(on_rank, mesh=MESH)
    assert len(set(texts)) == 1 and texts[0].startswith(said)
    assert "Offenders:" in texts[0]


@pytest.mark.parametrize(("mesh", "spec", "shape"), [
    ((2, 2), ((0, 1),), (8,)), ((2, 2), (0, 1), (7, 6)), ((2, 4), (None, 1, 0), (4, 8, 4)),
    ((2, 4), (1, None, 0, None), (4, 3, 2, 5)), ((2, 2), (None, 1), (4, 4)),
])
def test_pictures(mesh: Any, spec: Any, shape: Any) -> None:
    """Those of XLA's text are those of the layout, but for the names of axes."""
    layout = weft.Layout(weft.Mesh(mesh), shape, weft.P(*spec))
    for version in (1, 2):
        drawn = str(spmd.visualize_sharding(layout.hlo_sharding(version), shape))
        boxes = [[line for line in text.splitlines() if set(line) & set("┌│├└")]
                 for text in (drawn, str(weft.show(layout)))]
        assert boxes[0] == boxes[1] and len(boxes[0]) > 2

    def on_rank(bound: Any) -> str:
        x = weft.ones(*shape, mesh=bound, spec=weft.P(*spec))
        return str(spmd.visualize_tensor_sharding(x))

    assert set(weft.testing.run(on_rank, mesh=mesh)) == {f"f32{weft.show(layout)}"}


def test_a_picture_of_any_number_of_devices() -> None:
    tracemalloc.start()
    drawn = spmd.visualize_sharding(
        "{devices=[1024,1,1073741824]<=[32,1024,33554432]T(1,0,2) last_tile_dim_replicate}")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert f"{2**40:,} ranks" in str(drawn) and len(str(drawn)) < 4000
    assert peak < 2**21


def test_no_pictures() -> None:
    assert str(spmd.visualize_sharding("{replicated}", (4, 4)))
    for text in ("{manual}", "[2,2]", "{devices=[2,2]}"):
        with pytest.raises(PlacementError, match="is neither"):
            spmd.visualize_sharding(text)
    for text in ("{devices=[2,2]<=[4]T(1)}", "{devices=[2,2]<=[2]}", "{devices=[2,2]0,1,2,2}"):
        with pytest.raises(MeshError, match="for a mesh of 4"):
            spmd.visualize_sharding(text)


def test_an_op_sharding_of_a_million_devices_lists_none() -> None:
    tracemalloc.start()
    layout = weft.Layout(weft.Mesh({"a": 2**10, "b": 2**10}), (2**20, 8), weft.P("b"))
    found = spmd.OpSharding.of(layout)
    text, kind = str(found), found.type
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert text == "{devices=[1024,1,1024]<=[1024,1024]T(1,0) last_tile_dim_replicate}"
    assert kind == spmd.ShardingType.PARTIAL
    assert peak < 2**17
    small = spmd.OpSharding.of(weft.Layout(weft.Mesh({"a": 2, "b": 2}), (4, 4), weft.P("b")))
    assert small.tile_assignment == [[[0, 2]], [[1, 3]]]
    assert small.group_assignment == [[0], [1]]
    assert small.replication_groups == [[0, 2], [1, 3]]
