"""What docs/coverage.md says of names of other systems and no other test shows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import placement_types as torch_s

import weft
from tests.harness import ranks
from weft import Layout, LayoutError, Mesh, P, Replicate, Shard, ShardTensor
from weft.nn import PrepareModuleInput

MESH = {"dp": 2, "tp": 2}
X = torch.arange(42, dtype=torch.float64).view(7, 6)


@ranks(**MESH)
def test_mesh_and_placements_are_read_only(mesh: Any) -> None:
    """DTensor.device_mesh, DTensor.placements."""
    x: Any = weft.distribute_tensor(X, mesh, P("dp"))
    assert x.device_mesh is mesh and x.placements == (Shard(0), Replicate())
    for name in ("device_mesh", "placements", "spec", "sharding"):
        with pytest.raises(AttributeError):
            setattr(x, name, None)
    assert x.placements == (Shard(0), Replicate())


@ranks(**MESH)
def test_what_is_distributed_already_has_to_agree(mesh: Any) -> None:
    """distribute_tensor of a DTensor: the same again is let through, another layout is refused."""
    x = weft.distribute_tensor(X, mesh, P("dp"))
    assert weft.distribute_tensor(x, mesh, [Shard(0), Replicate()]) is x
    with pytest.raises(LayoutError, match=r"\.redistribute\("):
        weft.distribute_tensor(x, mesh, P("tp"))


@pytest.mark.parametrize("length", [0, 1, 5, 7, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_of_a_dim_are_counted_as_torch_counts_them(length: int, size: int) -> None:
    """Shard.local_shard_size_and_offset."""
    counted: Any = torch_s.Shard.local_shard_size_and_offset
    layout = Layout(Mesh({"x": size}), (length,), P("x"))
    for rank in range(size):
        ((start, stop),) = layout.box(rank)
        due, offset = counted(length, size, rank)
        assert stop - start == due
        assert not due or start == offset


@ranks(x=4)
def test_all_ranks_know_the_shapes_of_all_shards(mesh: Any) -> None:
    """ShardTensorSpec.sharding_shapes, local_shape."""
    rows = torch.ones((3, 0, 2, 2)[mesh.rank], 6)
    x = ShardTensor.from_local(rows, mesh, P("x"))
    with weft.explain() as log:
        shapes = [x.sharding.local_shape(rank) for rank in range(4)]
    assert shapes == [(3, 6), (0, 6), (2, 6), (2, 6)] and not log.events
    assert x.sharding.sizes_of(0) == (3, 0, 2, 2)
    assert tuple(x.to_local().shape) == shapes[mesh.rank]


def test_collectives_are_counted() -> None:
    """CommDebugMode.get_comm_counts, get_total_counts."""
    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P("dp", "tp"))
        with weft.explain() as log:
            x.redistribute(placements=P("dp")).redistribute(placements=P(None, "tp"))
            x.sum().item()
        return Counter(event.collective for event in log.events), len(log.events), log.nbytes

    for counts, total, nbytes in weft.testing.run(on_rank, mesh=MESH):
        assert counts["AllGather"] and sum(counts.values()) == total and nbytes > 0


def test_inputs_and_outputs_of_one_module_are_pinned() -> None:
    """PrepareModuleInputOutput: an input style within, `activations` around it."""
    def on_rank(mesh: Any) -> list[str]:
        seen: list[str] = []
        layer = nn.Sequential(nn.Identity(), nn.Linear(6, 4).double())
        weft.distribute_module(layer, mesh, activations={
            "0": PrepareModuleInput(P("dp")), "": P(None, "tp")})
        layer[0].register_forward_pre_hook(lambda _, args: seen.append(str(args[0].sharding)))
        return [*seen, str(layer(weft.distribute_tensor(X, mesh, P("tp"))).sharding), *seen]

    assert weft.testing.run(on_rank, mesh=MESH)[0] == ["[7, 4@tp]", "[7@dp, 6]"]


@ranks(**MESH)
def test_a_marked_tensor_tells_its_mesh_and_its_spec(mesh: Any) -> None:
    """XLAShardedTensor.mesh_shape, XLAShardedTensor.partition_spec."""
    x = weft.spmd.mark_sharding(X, mesh, (("dp", "tp"), None))
    assert x.spec == P(("dp", "tp")) and x.device_mesh.shape == (2, 2)
    assert isinstance(x * 2, ShardTensor) and (x * 2).spec == x.spec  # results, too


def test_replicas_take_the_first_rank_s_values() -> None:
    """Replicate: a broadcast from coordinate 0 of each group."""
    def on_rank(mesh: Any) -> float:
        x = weft.distribute_tensor(torch.full((3,), float(mesh.rank)), mesh, [Replicate()] * 2)
        return x.to_local()[0].item()

    assert weft.testing.run(on_rank, mesh=MESH) == [0.0] * 4


def test_numbers_are_those_of_one_rank_on_every_mesh() -> None:
    """OffsetBasedRNGTracker, and its manual_seed of a mesh."""
    def on_rank(mesh: Any) -> Any:
        weft.manual_seed(3)
        made = weft.randn(5, 6, mesh=mesh, spec=P(None, "x"))
        return torch.cat([made.full_tensor(), torch.dropout(made, 0.5, True).full_tensor()])

    (alone,) = weft.testing.run(on_rank, mesh={"x": 1})
    assert alone.unique().numel() > 40
    for num_ranks in (2, 4):
        for found in weft.testing.run(on_rank, mesh={"x": num_ranks}):
            assert torch.equal(found, alone)
