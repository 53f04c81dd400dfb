"""torch_xla's names for meshes and annotations, over weft's own meshes, layouts and tensors."""

from weft.core.counterparts import names_elsewhere
from weft.spmd.barrier import apply_backward_optimization_barrier
from weft.spmd.loader import ShardedLoader, ShardingSpec
from weft.spmd.manual import disable_manual_sharding, enable_manual_sharding
from weft.spmd.mark import (
    LocalShard,
    clear_sharding,
    global_tensor,
    load_local_shards_,
    local_shards,
    mark_sharding,
    mark_sharding_with_gradients,
    shard_as,
    sharding_spec,
    sharding_type,
    unwrap_sharded_tensor,
    wrap_as_sharded_tensor,
    wrap_if_sharded,
)
from weft.spmd.mesh import HybridMesh, Mesh, get_1d_mesh, get_global_mesh, set_global_mesh
from weft.spmd.sharding import OpSharding, ShardingType
from weft.spmd.visualize import visualize_sharding, visualize_tensor_sharding

__all__ = [
    "HybridMesh", "LocalShard", "Mesh", "OpSharding", "ShardedLoader", "ShardingSpec",
    "ShardingType", "apply_backward_optimization_barrier", "clear_sharding",
    "disable_manual_sharding", "enable_manual_sharding",
    "get_1d_mesh", "get_global_mesh", "global_tensor", "load_local_shards_", "local_shards",
    "mark_sharding", "mark_sharding_with_gradients", "set_global_mesh", "shard_as",
    "sharding_spec", "sharding_type", "unwrap_sharded_tensor", "visualize_sharding",
    "visualize_tensor_sharding", "wrap_as_sharded_tensor", "wrap_if_sharded",
]

__getattr__ = names_elsewhere("weft.spmd")
