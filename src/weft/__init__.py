"""One tensor on many devices: ordinary PyTorch code on global tensors with layouts."""

from weft import spmd, testing
from weft.comm import BoundMesh, as_bound_mesh, current_mesh, hybrid_mesh, init_mesh
from weft.core import (
    KINDS,
    Layout,
    Mesh,
    P,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from weft.errors import (
    CommunicationError,
    LayoutError,
    MeshError,
    ModuleError,
    PlacementError,
    ShardTypeError,
    StrictError,
    UnsupportedOpError,
    WeftError,
    WeftWarning,
)
from weft.interop import from_dtensor, to_dtensor
from weft.local import collectives, local_map
from weft.nn import distribute_module
from weft.own import register_handler, register_rule, unregister_handler, unregister_rule
from weft.planner import Link, Links, plan, set_links
from weft.rng import fork_rng, manual_seed, rng_state, set_rng_state
from weft.show import show
from weft.tensor import (
    ShardTensor,
    arange,
    cache_clear,
    cache_info,
    debug,
    distribute_tensor,
    empty,
    explain,
    full,
    ones,
    rand,
    randint,
    randn,
    randperm,
    scatter_tensor,
    strict,
    zeros,
)
from weft.transport import measure_links

__version__ = "0.1.0"

__all__ = [
    "KINDS", "P", "BoundMesh", "CommunicationError", "Layout", "LayoutError", "Link", "Links",
    "Mesh", "MeshError", "ModuleError", "Partial", "Placement", "PlacementError", "Replicate",
    "Shard", "ShardTensor", "ShardTypeError", "StrictError", "StridedShard",
    "UnsupportedOpError", "WeftError", "WeftWarning", "arange", "as_bound_mesh", "cache_clear",
    "cache_info", "collectives", "current_mesh", "debug", "distribute_module", "distribute_tensor",
    "empty", "explain", "fork_rng", "from_dtensor", "full", "hybrid_mesh", "init_mesh",
    "local_map", "manual_seed", "measure_links", "ones", "plan", "rand", "randint", "randn",
    "randperm", "register_handler", "register_rule", "rng_state", "scatter_tensor", "set_links",
    "set_rng_state", "show", "spmd", "strict", "testing", "to_dtensor", "unregister_handler",
    "unregister_rule", "zeros",
]
