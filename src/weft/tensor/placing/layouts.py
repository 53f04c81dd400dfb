"""What users give as placements, and tensors for what they give as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import LayoutError, message
from weft.tensor.meta import intern, replicated_meta
from weft.tensor.placing.foreign import taken
from weft.tensor.shard_tensor import ShardTensor, wrap

__all__ = ["as_layout", "as_sharded", "layout_of", "local_to_sharded"]


def as_layout(mesh: BoundMesh, shape: Sequence[int], placements: Any) -> Layout:
    """The layout that placements, a P or a Layout mean for a tensor of this shape.

    Raises:
        LayoutError: a Layout of another mesh or shape.
    """
    if isinstance(placements, ShardTensor):
        placements = placements.layout
    if not isinstance(placements, Layout):
        return Layout(mesh, shape, placements)
    if placements.shape != tuple(shape) or placements.mesh != mesh:
        raise LayoutError(
            message("placements=Layout", f"the layout is {placements} on {placements.mesh}, the "
                    f"tensor has shape {tuple(shape)} on {mesh}",
                    "a layout is given for the tensor's own shape and mesh", [str(placements)],
                    f"Layout(mesh, {tuple(shape)}, P(...))")
        )
    return placements


def layout_of(tensor: torch.Tensor, mesh: BoundMesh) -> Layout:
    """The layout of an operand; a plain tensor is the same on every rank."""
    if type(tensor) is ShardTensor:
        return tensor._meta.layout
    return Layout.replicated(mesh.abstract, tensor.shape)


def as_sharded(tensor: torch.Tensor, mesh: BoundMesh) -> ShardTensor:
    """A ShardTensor as it is, a DTensor as what it is; a plain tensor as Replicate on the mesh."""
    tensor = taken(tensor, mesh)
    if type(tensor) is ShardTensor:
        return tensor
    local = tensor if mesh.here is not None else tensor.new_empty(0)
    return wrap(local, replicated_meta(mesh, tensor))


def local_to_sharded(
    local: torch.Tensor, mesh: BoundMesh, layout: Layout, strides: tuple[int, ...] | None = None
) -> ShardTensor:
    """The ShardTensor of a local tensor that lies as the layout says; of these global strides."""
    meta = intern(mesh, layout, local.dtype, local.device, local.requires_grad, strides)
    return wrap(local, meta)
