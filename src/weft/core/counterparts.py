"""What weft has for names of other libraries: said where they are asked of `weft` itself."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Self

__all__ = ["ATTRIBUTES", "COUNTERPARTS", "attribute_elsewhere", "names_elsewhere", "said_of"]

_JOB = "an ordinary function; ops run when they are called"
_SHARDED = 'weft.distribute_module(module, mesh, shardings={"*": P("dp")})'
_REPLICATED = "weft.distribute_module(module, mesh)"
_LINEAR = "nothing to patch: linear keeps batch dims apart"
_STREAM = "weft.manual_seed(0); numbers depend on the seed, the call and the place alone"

COUNTERPARTS = {
    "AbstractMesh": "weft.Mesh",
    "CommDebugMode": "weft.explain()",
    "CPUOffloadPolicy": "no offload: parameters stay on the device of their mesh",
    "DDP": _REPLICATED,
    "DataLoader": 'torch\'s, and weft.ShardedLoader(loader, P("dp"), mesh=mesh) around it',
    "DTensor": "weft.ShardTensor; weft.from_dtensor(d) makes one of a DTensor",
    "DeviceMesh": 'weft.init_mesh({"dp": 2, "tp": 2}); calls take torch\'s DeviceMesh as well',
    "DistributedDataParallel": _REPLICATED,
    "DistributedManager": 'weft.init_mesh({"dp": 2, "tp": 2})',
    "EinsumLinear": _LINEAR,
    "FSDP": _SHARDED,
    "FullyShardedDataParallel": _SHARDED,
    "MixedPrecisionPolicy": 'gather={"": weft.nn.Gather(compute_dtype=torch.bfloat16, '
                            "reduce_dtype=torch.float32)} of weft.distribute_module",
    "MpDeviceLoader": 'weft.ShardedLoader(loader, P("dp"), mesh=mesh)',
    "NamedSharding": "weft.Layout(mesh, shape, P(...)), or a mesh and a P",
    "OffsetBasedRNGTracker": _STREAM,
    "ParallelStyle": 'specs of parameters, shardings={"*.weight": P("tp")}',
    "PartitionSpec": "weft.P",
    "PositionalSharding": "weft.Layout(mesh, shape, P(...))",
    "PrepareModuleInputOutput": "shardings={name: weft.nn.PrepareModuleInput(...)}, "
                                "activations={name: P(...)}",
    "ShardTensorSpec": "weft.Layout",
    "SpmdFullyShardedDataParallel": _SHARDED,
    "TensorPromotionMode": "nothing to choose: a plain tensor counts as replicated; "
                           "weft.strict() refuses it",
    "XLAPatchedLinear": _LINEAR,
    "XLAShard": "weft.spmd.LocalShard",
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
    "all_gather_v": 'weft.collectives.all_gather(x, "dp", dim, sizes=sizes)',
    "annotate_custom_sharding": "weft.spmd.mark_sharding(t, mesh, spec)",
    "apply_xla_patch_to_nn_linear": _LINEAR,
    "auto_policy": "layouts are explicit; weft.plan and weft.explain() say what they cost",
    "checkpoint": "torch.distributed.checkpoint, which takes ShardTensors",
    "compute_local_shape_and_global_offset": "x.sharding.box(rank)",
    "context_parallel": "nothing to call: attention takes sharded sequences",
    "device_put": "weft.distribute_tensor(x, mesh, P(...))",
    "enable_spmd": "nothing to switch on: a tensor is sharded when it is made so",
    "from_local": "weft.ShardTensor.from_local",
    "full_tensor": "x.full_tensor()",
    "fully_shard": _SHARDED,
    "gather_v": "x.full_tensor()",
    "halo_exchange": "nothing to call: a convolution of a sharded field fetches its halo",
    "implicit_replication": "nothing to call: a plain tensor counts as replicated",
    "indexed_all_to_all_v": "x[index], of a sharded index; by hand weft.collectives.all_to_all",
    "init_device_mesh": 'weft.init_mesh({"dp": 2, "tp": 2})',
    "init_process_group": "weft.init_mesh, which starts torch.distributed from the launcher",
    "jit": _JOB,
    "layout": "x.sharding, a weft.Layout; x.layout is torch's word for strided and sparse tensors",
    "load": "torch.distributed.checkpoint.load, into any layout; torch.load, of a rank's own file",
    "loss_parallel": "nothing to call: cross_entropy takes sharded classes",
    "make_array_from_callback": "weft.from_callback(shape, mesh, P(...), fn)",
    "make_mesh": 'weft.init_mesh({"dp": 2, "tp": 2})',
    "mark_step": _JOB,
    "no_grad": "torch.no_grad(), as everywhere",
    "no_sync": "weft.nn.accumulate(model)",
    "parallelize_module": 'weft.distribute_module(module, mesh, shardings={"0": '
                          'weft.nn.ColwiseParallel("tp")})',
    "pjit": _JOB,
    "psum_scatter": "weft.collectives.reduce_scatter",
    "redistribute": "x.redistribute(placements=P(...))",
    "save": "torch.distributed.checkpoint.save, each block once; torch.save, a rank's own blocks",
    "scatter_v": "weft.scatter_tensor(x, 0, mesh, P(...))",
    "set_mesh": "weft.spmd.set_global_mesh(mesh), or with mesh: ...",
    "reduce_loss": "loss.item(), the global value on every rank",
    "register_fsdp_forward_method": "nothing to register: any method may be called",
    "register_sharding": 'weft.register_rule(op, "b i, i o -> b o")',
    "ring_attention": "nothing to call: attention takes sharded sequences",
    "shard_map": "weft.local_map(fn, in_specs=P(...), out_specs=P(...))",
    "shard_tensor": "weft.distribute_tensor(x, mesh, P(...))",
    "sync_module_over_mesh": _REPLICATED,
    "to_local": "x.to_local()",
    "use_mesh": "with mesh: ...",
    "use_spmd": "nothing to switch on: a tensor is sharded when it is made so",
    "visualize_array_sharding": "weft.show(x)",
    "XLAShardedTensor": "weft.ShardTensor",
    "xla_distribute_module": _REPLICATED,
    "xla_distribute_tensor": "weft.distribute_tensor(x, mesh, P(...))",
    "xla_patched_nn_linear_forward": _LINEAR,
    "with_sharding_constraint": "x.redistribute(placements=P(...))",
}
"""A name of torch, JAX, torch_xla or PhysicsNeMo -> what stands in its place."""

ATTRIBUTES = {
    "_local_tensor": "x.to_local()",
    "_spec": "x.sharding",
    "addressable_shards": "x.to_local(), weft.spmd.local_shards(x)",
    "full": "x.full_tensor()",
    "global_tensor": "weft.spmd.global_tensor(x)",
    "load_local_shards_": "weft.spmd.load_local_shards_(x, shards)",
    "local": "x.to_local()",
    "local_shards": "weft.spmd.local_shards(x)",
    "local_tensor": "x.to_local()",
    "mesh": "x.device_mesh",
    "mesh_shape": "x.device_mesh.shape",
    "partition_spec": "x.spec",
    "sharding_spec": "weft.spmd.sharding_spec(x)",
    "sharding_type": "weft.spmd.sharding_type(x)",
}
"""Attributes of the tensors of other libraries -> what stands in their place."""


@dataclass(frozen=True, slots=True)
class attribute_elsewhere:
    """An attribute that classes of other libraries have: asking for it raises, and says what to
    write. A program may set an attribute of its own by that name."""

    name: str
    code: str

    def __get__(self, asked: object, _: object = None) -> Self:
        if asked is None:  # of the class
            return self
        raise AttributeError(
            f"{type(asked).__name__!r} object has no attribute {self.name!r}; in its place: "
            f"{self.code}")


def names_elsewhere(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a package for the names that other libraries have in theirs."""

    def asked(name: str) -> NoReturn:
        place = said_of(name)
        told = f"module {module!r} has no attribute {name!r}{place}"
        frame = inspect.currentframe()
        caller = frame and frame.f_back
        if place and caller and caller.f_code.co_name == "_handle_fromlist":
            raise ImportError(told, name=name)  # of `from ... import`, which would drop the text
        raise AttributeError(told, name=name, obj=sys.modules[module])

    return asked


def said_of(name: str) -> str:
    """The end of an error about a name that weft does not have; empty if it is nobody's."""
    return f"; in its place: {COUNTERPARTS[name]}" if name in COUNTERPARTS else ""
