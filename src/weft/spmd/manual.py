"""torch_xla's manual regions, call by call; `weft.local_map` does the same for a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.comm import as_bound_mesh
from weft.core import P
from weft.core.arguments import MeshLike
from weft.core.names import also_called
from weft.errors import LayoutError, ShardTypeError
from weft.spmd.mesh import as_spec
from weft.tensor import ShardTensor
from weft.tensor.placing.border import into_local, out_of_local
from weft.tensor.placing.layouts import check_tensor

__all__ = ["disable_manual_sharding", "enable_manual_sharding"]


@also_called(device_mesh="mesh", spec="partition_spec")
def enable_manual_sharding(
    t: torch.Tensor, partition_spec: P | Sequence[Any], *, mesh: MeshLike | None = None
) -> torch.Tensor:
    """This rank's block of a tensor in a sharding, as a plain tensor that the program works on.

    Gradients return as each rank finds them; for a tensor that is replicated over an axis, they
    are summed.

    Args:
        t: a ShardTensor, or a plain tensor that is equal on all ranks.
        partition_spec: see `mark_sharding`.
        mesh: the tensor's own, else the current or global one.

    Raises:
        ShardTypeError: not a tensor, or not a spec.
        PlacementError: more entries than dims.
        MeshError: a plain tensor, and no mesh.
    """
    check_tensor(t, "enable_manual_sharding(t)")
    if mesh is None and isinstance(t, ShardTensor):
        mesh = t.device_mesh
    bound = as_bound_mesh(mesh, "enable_manual_sharding(mesh)")
    return into_local(t, bound, as_spec(partition_spec, t.ndim), "enable_manual_sharding")


@also_called(device_mesh="mesh", spec="partition_spec", global_shape="full_shape")
def disable_manual_sharding(
    t: torch.Tensor, partition_spec: P | Sequence[Any], full_shape: Sequence[int], *,
    mesh: MeshLike | None = None,
) -> ShardTensor:
    """The global tensor of which every rank has its block, in the sharding of a spec.

    Args:
        t: this rank's block.
        partition_spec: see `mark_sharding`.
        full_shape: the global shape. Blocks that are not those of the default cuts are accepted
            (the ranks exchange their sizes) if they add up to it.
        mesh: None takes the current or global one.

    Raises:
        ShardTypeError: `t` is a ShardTensor.
        LayoutError: blocks that do not make up the shape.
    """
    if isinstance(t, ShardTensor):
        raise ShardTypeError(
            "disable_manual_sharding(t)", f"t is a ShardTensor {t.sharding}",
            "inside a manual region tensors are local", [str(t.sharding)],
            "pass what enable_manual_sharding returned, or what was made of it")
    bound = as_bound_mesh(mesh, "disable_manual_sharding(mesh)")
    # What is no tensor is refused there, on all ranks.
    spec = as_spec(partition_spec, t.ndim if isinstance(t, torch.Tensor) else None)
    out = out_of_local(t, bound, spec, region="disable_manual_sharding(t)")
    if tuple(out.shape) != tuple(full_shape):
        raise LayoutError(
            "disable_manual_sharding(full_shape)", f"it is {tuple(full_shape)}, and the "
            f"blocks make up {tuple(out.shape)}", "the blocks make up the full shape",
            [tuple(t.shape)], f"full_shape={tuple(out.shape)}")
    return out
