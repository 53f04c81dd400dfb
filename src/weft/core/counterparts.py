"""What weft has for names of other libraries: said where they are asked of `weft` itself."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["COUNTERPARTS", "attribute_elsewhere", "said_of"]

_JOB = "an ordinary function; ops run when they are called"
_SHARDED = 'weft.distribute_module(module, mesh, shardings={"*": P("dp")})'
_REPLICATED = "weft.distribute_module(module, mesh)"

COUNTERPARTS = {
    "AbstractMesh": "weft.Mesh",
    "CommDebugMode": "weft.explain()",
    "DDP": _REPLICATED,
    "DTensor": "weft.ShardTensor; weft.from_dtensor(d) makes one of a DTensor",
    "DeviceMesh": 'weft.init_mesh({"dp": 2, "tp": 2}); calls take torch\'s DeviceMesh as well',
    "DistributedDataParallel": _REPLICATED,
    "DistributedManager": 'weft.init_mesh({"dp": 2, "tp": 2})',
    "FSDP": _SHARDED,
    "FullyShardedDataParallel": _SHARDED,
    "NamedSharding": "weft.Layout(mesh, shape, P(...)), or a mesh and a P",
    "PartitionSpec": "weft.P",
    "PositionalSharding": "weft.Layout(mesh, shape, P(...))",
    "addressable_shards": "x.to_local() and x.sharding.box(mesh.rank)",
    "all_gather_into_tensor": "weft.collectives.all_gather(x, axis), of a rank's own tensor",
    "all_reduce": "weft.collectives.psum(x, axis), pmax, pmin or pmean, of a rank's own tensor",
    "all_to_all_single": "weft.collectives.all_to_all(x, axis, split_dim, concat_dim), of a rank's "
                         "own tensor",
    "barrier": "nothing to call: a rank waits where it needs another one's data",
    "get_rank": "mesh.rank",
    "get_world_size": "mesh.size()",
    "reduce_scatter_tensor": "weft.collectives.reduce_scatter(x, axis), of a rank's own tensor",
    "send": "weft.collectives.ppermute(x, axis, pairs), of a rank's own tensor",
    "checkpoint": "torch.distributed.checkpoint, which takes ShardTensors",
    "device_put": "weft.distribute_tensor(x, mesh, P(...))",
    "enable_spmd": "nothing to switch on: a tensor is sharded when it is made so",
    "from_local": "weft.ShardTensor.from_local",
    "full_tensor": "x.full_tensor()",
    "fully_shard": _SHARDED,
    "halo_exchange": "nothing to call: a convolution of a sharded field fetches its halo",
    "implicit_replication": "nothing to call: a plain tensor counts as replicated",
    "init_device_mesh": 'weft.init_mesh({"dp": 2, "tp": 2})',
    "init_process_group": "weft.init_mesh, which starts torch.distributed from the launcher",
    "jit": _JOB,
    "loss_parallel": "nothing to call: cross_entropy takes sharded classes",
    "make_array_from_callback": "weft.from_callback(shape, mesh, P(...), fn)",
    "make_mesh": 'weft.init_mesh({"dp": 2, "tp": 2})',
    "mark_step": _JOB,
    "parallelize_module": 'weft.distribute_module(module, mesh, shardings={"0": '
                          'weft.nn.ColwiseParallel("tp")})',
    "pjit": _JOB,
    "psum_scatter": "weft.collectives.reduce_scatter",
    "redistribute": "x.redistribute(placements=P(...))",
    "set_mesh": "weft.spmd.set_global_mesh(mesh), or with mesh: ...",
    "shard_map": "weft.local_map(fn, in_specs=P(...), out_specs=P(...))",
    "shard_tensor": "weft.distribute_tensor(x, mesh, P(...))",
    "to_local": "x.to_local()",
    "use_mesh": "with mesh: ...",
    "use_spmd": "nothing to switch on: a tensor is sharded when it is made so",
    "visualize_array_sharding": "weft.show(x)",
    "XLAShardedTensor": "weft.ShardTensor",
    "with_sharding_constraint": "x.redistribute(placements=P(...))",
}
"""A name of torch, JAX, torch_xla or PhysicsNeMo -> what stands in its place."""


def attribute_elsewhere(name: str, code: str) -> property:
    """An attribute that torch's DTensor has: asking for it raises, and says what to write."""

    def asked(self: object) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}; in its place: {code}")

    return property(asked)


def said_of(name: str) -> str:
    """The end of an error about a name that weft does not have; empty if it is nobody's."""
    return f"; in its place: {COUNTERPARTS[name]}" if name in COUNTERPARTS else ""
