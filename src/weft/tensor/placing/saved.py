"""ShardTensors in files: every rank writes its own block, and reads it back into its own place.

`pickle` and `torch.save` write what one rank holds, with the layout and the rank's place on the
mesh; nothing is sent. On reading, the tensor is rebuilt on the mesh of the same ranks, which is
bound if necessary. A block that is the whole tensor serves any rank: each takes its own block of
it, and where the mesh is not, it is a plain tensor. A part of a tensor is of no use to a rank of
another number: the error says how to read all blocks, with as many ranks as there were, simulated
in one process if need be; the whole can then be resharded. The parts are plain values, so that
`torch.load(weights_only=True)` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from weft.comm import this_world
from weft.core import Layout, Mesh, P, Partial, Replicate, Shard, StridedShard
from weft.errors import MeshError, UnsupportedOpError
from weft.tensor.leaves import track_leaf
from weft.tensor.modes import check_traced
from weft.tensor.placing.boxed import boxed
from weft.tensor.placing.freed import local_data, memory_of
from weft.tensor.placing.layouts import local_to_sharded
from weft.tensor.shard_tensor import ShardTensor, attributes_of

__all__ = ["reduced", "refuse_to_share"]


def reduced(tensor: ShardTensor) -> tuple[Any, ...]:
    """What pickle writes: the function that restores the tensor, and its arguments.

    As for a plain tensor these are the data, `requires_grad` and the attributes, and tensors that
    share memory still do when they are read back from one file.
    """
    tensor = boxed(tensor)
    meta = tensor._meta
    mesh, layout = meta.mesh, meta.layout
    facts = {
        "rank": mesh.rank, "device_type": mesh.device_type,
        "axes": tuple(zip(mesh.axis_names, mesh.axis_sizes)),
        "ranks": mesh.ranks, "shape": layout.shape, "dims": layout.dims, "cuts": layout.cuts,
        "partial": layout.partial, "strides": meta.strides, "requires_grad": tensor.requires_grad,
    }
    local = local_data(tensor).detach()
    if memory_of(local) is not None:  # it has other parameters, too
        local = local.clone()
    return _restored, (local, facts, attributes_of(tensor))


def refuse_to_share(tensor: ShardTensor) -> NoReturn:
    """Raise UnsupportedOpError for `_typed_storage()`: workers of a DataLoader call it, to send a
    batch home."""
    check_traced("_typed_storage")
    layout = str(tensor.sharding)
    raise UnsupportedOpError(
        "_typed_storage()", "it is asked for memory that two processes share, as by workers of a "
        f"DataLoader; the tensor is {layout}", "ShardTensors live in the processes of their mesh",
        [layout], "DataLoader(..., num_workers=0)\n"
        "weft.ShardedLoader(dataloader, P(...), mesh=mesh), whose workers load plain samples")


def _restored(
    local: torch.Tensor, facts: Mapping[str, Any], attributes: Mapping[str, Any]
) -> torch.Tensor:
    """The ShardTensor of a block that this rank, or its counterpart, has written; of a block that
    is the whole tensor, this rank's part of it, and all of it where this rank is not on the mesh.

    Raises:
        MeshError: a part of the tensor, by a rank of another number, or of a larger world.
    """
    axes, ranks = facts["axes"], facts["ranks"]
    named = [name for name, _ in axes] != list(range(len(axes)))
    value = Mesh(axes if named else [size for _, size in axes], ranks)
    layout = Layout.make(value, facts["shape"], facts["dims"], facts["cuts"], facts["partial"])
    world, mine = this_world(), range(value.size()) if ranks is None else ranks
    fits = max(mine) < world.size
    if world.rank != facts["rank"] or not fits:
        is_whole = facts["rank"] in mine and local.shape == layout.shape
        if not is_whole or layout.is_partial:
            raise _misplaced(layout, value, facts["rank"], world.rank, world.size)
        fits = fits and world.rank in mine
        if fits and layout.local_shape(world.rank) != layout.shape:
            local = local[tuple(slice(*ends) for ends in layout.box(world.rank))].clone()
    tensor = local.requires_grad_(facts["requires_grad"])
    if fits:
        mesh = world.bind(value, facts.get("device_type", local.device.type))
        tensor = local_to_sharded(track_leaf(tensor), mesh, layout, facts["strides"])
    vars(tensor).update(attributes)
    return tensor


def _misplaced(layout: Layout, mesh: Mesh, written: int, rank: int, size: int) -> MeshError:
    _, num_ranks = mesh.rank_span
    fix = (
        "def whole(mesh): return torch.load(f\"{mesh.rank}.pt\").full_tensor()\n"
        f"full = weft.testing.run(whole, num_ranks={num_ranks})[0]\n"
        "x = weft.distribute_tensor(full, mesh, placements)\n"
    )
    if num_ranks == size:
        fix = "each rank reads its own file: torch.load(f\"{mesh.rank}.pt\")\n"
    return MeshError(
        "pickle.load, torch.load", f"the block of a tensor {layout} was written by rank "
        f"{written} of {mesh!r}, and is read by rank {rank} of a world of {size}",
        "a rank reads what the same rank has written; where the world is another, all "
        "blocks are read by as many ranks as there were and joined", [str(layout)],
        fix +
        "if one rank wrote, its file has its blocks alone; next time every rank calls\n"
        "torch.distributed.checkpoint.save(state, checkpoint_id=folder), or, before one "
        "rank writes,\n"
        "{name: x.full_tensor() for name, x in model.state_dict().items()}")


torch.serialization.add_safe_globals(
    [_restored, Mesh, Layout, P, Shard, StridedShard, Replicate, Partial]
)
