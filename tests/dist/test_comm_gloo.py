"""Process groups over gloo: the model, torch's DeviceMesh, and simulated ranks bit for bit."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import weft
from tests.cases.collectives import DTYPES, MESHES, faults_on_rank, kinds_of
from tests.effort import drawn
from tests.gloo import GlooWorld
from weft import P, spmd
from weft.comm import (
    BoundMesh,
    as_bound_mesh,
    current_mesh,
    group_calls,
    init_mesh,
    process_group,
    run_simulated,
)
from weft.comm.process_group import ProcessCommunicator
from weft.core import Mesh
from weft.errors import MeshError


def everything(mesh):
    """On the first mesh in all dtypes."""
    dtypes = DTYPES if mesh.abstract == MESHES[0] else drawn(DTYPES)
    faults = [faults_on_rank(mesh, dtype) for dtype in dtypes]
    return None if mesh.here is None else [text for some in faults for text in some or ()]


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_every_collective_equals_the_model(gloo: GlooWorld, mesh: Mesh) -> None:
    outside = [mesh.position_of_rank(rank) is None for rank in range(4)]
    assert gloo.run(everything, mesh) == [None if out else [] for out in outside]


def random_reductions(mesh):
    generator = torch.Generator().manual_seed(mesh.rank)
    comm, results = mesh.comm((0, 1)), []
    for numel in (5, 1000, 100_003, 300_003):  # the last two in pieces, by buffers and messages
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            x = torch.randn(numel, generator=generator).to(dtype)
            for kind in kinds_of(dtype):
                results.append(comm.all_reduce(x, kind))
                results.append(comm.reduce_scatter(x, (2, numel - 3, 0, 1), kind))
    return [result.numpy(force=True) if result.dtype is not torch.bfloat16
            else result.float().numpy(force=True) for result in results]


def test_gloo_and_simulated_ranks_agree_bit_for_bit(gloo: GlooWorld) -> None:
    axes = {"dp": 2, "tp": 2}
    simulated = run_simulated(random_reductions, mesh=axes)
    for mine, theirs in zip(gloo.run(random_reductions, axes), simulated, strict=True):
        assert [one.tobytes() for one in mine] == [one.tobytes() for one in theirs]


def lent(mesh):
    """How many buffers each collective lends to the backend."""
    comm, x, counts = mesh.comm((0, 1)), torch.ones(8), {}
    calls = {
        "all_reduce": lambda: mesh.comm((0,)).all_reduce(x, "sum"),  # of two: gloo's own
        "all_gather": lambda: comm.all_gather(x, (8,) * 4),
        "uneven": lambda: comm.all_gather(x[:mesh.rank], (0, 1, 2, 3)),
        "reduce_scatter": lambda: comm.reduce_scatter(x, (2,) * 4, "sum"),
        "all_to_all": lambda: comm.all_to_all(x, (2,) * 4, (2,) * 4),
        "broadcast": lambda: comm.broadcast(x, 0),
    }
    for name, call in calls.items():
        with mock.patch.object(group_calls, "lend", side_effect=group_calls.lend) as spy:
            call()
        counts[name] = spy.call_count
    return counts


def test_no_collective_gives_the_backend_a_buffer_that_it_may_be_last_to_hold(
    gloo: GlooWorld,
) -> None:
    expected = {"all_reduce": 1, "all_gather": 2, "uneven": 2, "reduce_scatter": 2,
                "all_to_all": 2, "broadcast": 1}
    assert gloo.run(lent, {"dp": 2, "tp": 2}) == [expected] * 4


def wrapping(mesh):
    """What a torch DeviceMesh becomes, and what our meshes are to torch."""
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    bound = as_bound_mesh(theirs)
    assert bound is as_bound_mesh(theirs) is as_bound_mesh(bound)
    bound.cache["key"] = "kept"
    assert as_bound_mesh(theirs).cache == {"key": "kept"}
    assert bound == Mesh({"a": 2, "b": 2})
    assert bound.device_mesh is theirs
    assert [bound.get_group(axis) for axis in ("a", "b")] == theirs.get_all_groups()
    assert bound.get_all_groups() == theirs.get_all_groups()
    assert bound.here == tuple(theirs.get_coordinate() or ())
    assert (bound.shape, bound.ndim, bound.size()) == (theirs.shape, theirs.ndim, theirs.size())
    assert bound.get_rank() == theirs.get_rank()
    for name in ("a", "b"):
        assert bound[name].get_group() is theirs[name].get_group()
        assert bound.get_local_rank(name) == theirs.get_local_rank(name)
        assert as_bound_mesh(theirs[name]) == bound[name]
        assert as_bound_mesh(theirs[name]).get_group() is theirs.get_group(name)
    assert bound.comm((0, 1)).exchange(mesh.rank) == [0, 1, 2, 3]
    with bound:
        assert current_mesh() is bound

    assert isinstance(mesh.device_mesh, DeviceMesh)
    assert mesh.device_mesh is mesh.device_mesh
    assert mesh.device_mesh.mesh_dim_names == ("dp", "tp")
    assert mesh.device_mesh.mesh.tolist() == mesh.mesh.tolist()
    assert as_bound_mesh(mesh.device_mesh) is mesh
    assert init_mesh({"dp": 2, "tp": 2}) is mesh

    unnamed = DeviceMesh("cpu", [2, 0, 1, 3])
    assert as_bound_mesh(unnamed) == Mesh((4,), ranks=(2, 0, 1, 3))
    assert as_bound_mesh(unnamed).comm((0,)).exchange(mesh.rank) == [2, 0, 1, 3]
    partial = DeviceMesh("cpu", [3, 1])
    assert as_bound_mesh(partial).here == {3: (0,), 1: (1,)}.get(mesh.rank)


def test_a_torch_device_mesh_is_taken_as_it_is(gloo: GlooWorld) -> None:
    gloo.run(wrapping, {"dp": 2, "tp": 2})


def torchs_default(mesh):
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    pair = DeviceMesh("cpu", [3, 1])
    full = torch.arange(6.0)
    with theirs:
        assert current_mesh() is as_bound_mesh(None) is as_bound_mesh(theirs)
        x = weft.distribute_tensor(full, None, P("b"))
        assert x.device_mesh is as_bound_mesh(theirs)
        assert weft.zeros(4).device_mesh is x.device_mesh
        assert x.sum().item() == 15
        with mesh:  # the innermost counts, whosever it is
            assert current_mesh() is mesh
            with pair:
                assert current_mesh() == Mesh((2,), ranks=(3, 1))
                assert (weft.ones(2).device_mesh.here is None) == (mesh.rank in (0, 2))
            assert current_mesh() is mesh
        assert current_mesh() is as_bound_mesh(theirs)
    assert current_mesh() is None
    spmd.set_global_mesh(theirs)
    assert weft.collectives.psum(torch.ones(()), ("a", "b")).item() == 4
    found = []
    thread = threading.Thread(target=lambda: found.append(weft.zeros(2).device_mesh))
    thread.start()
    thread.join()
    assert found == [as_bound_mesh(theirs)]
    spmd.set_global_mesh(None)


def test_a_torch_device_mesh_is_the_default_inside_of_with(gloo: GlooWorld) -> None:
    gloo.run(torchs_default, {"dp": 2, "tp": 2})


def group_of(mesh, *axes):
    comm = mesh.comm(axes)
    assert isinstance(comm, ProcessCommunicator)
    return comm.group


def groups(mesh):
    small = init_mesh({"x": 2, "y": 2, "z": 1})
    whole = [group_of(small, 0, 1), group_of(small, 0, 1, 2), group_of(mesh, 0, 1)]
    assert whole == [dist.group.WORLD] * 3
    assert group_of(small, 1, 2) is group_of(small, 1) is mesh.get_group("tp")
    assert group_of(small["y"], 0) is mesh.get_group("tp")


def test_meshes_share_groups(gloo: GlooWorld) -> None:
    gloo.run(groups, {"dp": 2, "tp": 2})


def apart(mesh):
    """Groups that ranks make one after the other, of which each rank has made another number."""
    told = []
    for ranks in ((2, 0, 1), (3, 1, 2), (2, 3, 0)):
        some = init_mesh((len(ranks),), ranks=ranks)
        if some.here is not None:
            told.append(some.comm((0,)).exchange(mesh.rank))
    return told


def test_ranks_meet_whatever_other_groups_they_are_in(gloo: GlooWorld) -> None:
    assert gloo.run(apart, {"dp": 2, "tp": 2}) == [
        [[2, 0, 1], [2, 3, 0]], [[2, 0, 1], [3, 1, 2]], [[2, 0, 1], [3, 1, 2], [2, 3, 0]],
        [[3, 1, 2], [2, 3, 0]],
    ]


def split_groups(mesh):
    """As though the default group were bound to a device: groups are made by the whole world."""
    world = mesh.world
    world._splits = lambda: True
    try:
        mixed = init_mesh({"u": 2, "v": 2}, ranks=(0, 3, 1, 2))  # pairs that no other mesh has
        faults = [faults_on_rank(mixed, torch.float32), [mixed.rows((0,)), mixed.rows((1,))]]
        three = init_mesh((3,), ranks=(0, 1, 3))
        if three.here is not None:
            with pytest.raises(MeshError, match="without device_id="):
                three.comm((0,))
    finally:
        del world._splits
    return faults


def test_groups_split_off_by_the_whole_world(gloo: GlooWorld) -> None:
    assert gloo.run(split_groups, {"dp": 2, "tp": 2}) == [
        [[], [[(0, 1), (3, 2)], [(0, 3), (1, 2)]]]
    ] * 4


def native(mesh):
    """As though gloo reduced sums and whole numbers exactly: the paths that NCCL takes."""
    exact = process_group._EXACT
    faults = []
    try:
        exact["gloo"] = exact["nccl"]
        for axes in ({"x": 2, "y": 2}, Mesh({"x": 4}), Mesh({"x": 2, "y": 2}, (3, 1, 0, 2))):
            bound = BoundMesh(mesh.world, Mesh(axes) if isinstance(axes, dict) else axes, "cpu")
            faults += [faults_on_rank(bound, dtype) for dtype in (torch.float32, torch.int64)]
            comm = bound.comm((0,))
            assert isinstance(comm, ProcessCommunicator)
            assert comm.exact
            assert comm.native is (list(comm.ranks) == sorted(comm.ranks))
    finally:
        del exact["gloo"]
    return faults


def test_the_paths_of_backends_with_exact_reductions(gloo: GlooWorld) -> None:
    assert gloo.run(native, {"dp": 2, "tp": 2}) == [[[]] * 6] * 4


def too_large(mesh):
    with pytest.raises(MeshError, match="needs 6 ranks up to rank 5, the world has 4"):
        init_mesh({"dp": 2, "tp": 3})
    with pytest.raises(MeshError, match="Offenders: 4, 9"):
        init_mesh((3,), ranks=(4, 0, 9))


def test_a_mesh_larger_than_the_world_is_refused(gloo: GlooWorld) -> None:
    gloo.run(too_large, {"dp": 2, "tp": 2})


def simulated_inside(mesh):
    inner = run_simulated(lambda inside: inside.comm((0,)).exchange((mesh.rank, inside.rank)), 2)
    return inner == [[(mesh.rank, 0), (mesh.rank, 1)]] * 2


def test_simulated_ranks_inside_a_process(gloo: GlooWorld) -> None:
    assert gloo.run(simulated_inside, (4,)) == [True] * 4
