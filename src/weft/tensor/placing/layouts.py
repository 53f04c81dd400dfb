"""Layouts for users' placements, and tensors for users' tensor arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import LayoutError, ShardTypeError, UnsupportedOpError
from weft.tensor.leaves import track_leaf
from weft.tensor.meta import dense, intern, replicated_meta
from weft.tensor.placing.foreign import is_foreign, taken
from weft.tensor.placing.transitions import transition_between
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.transport.order import order_of, strides_like

__all__ = [
    "as_layout", "as_sharded", "check_given", "check_plain", "check_tensor", "common_strides",
    "layout_of", "leaf", "local_to_sharded",
]


def as_layout(
    mesh: BoundMesh, shape: Sequence[int], placements: Any, call: str = "placements"
) -> Layout:
    """The layout that placements, a P or a Layout mean for a tensor of this shape. `call` is the
    public call and its argument, for errors."""
    if isinstance(placements, ShardTensor):
        placements = placements.sharding
    if not isinstance(placements, Layout):
        return Layout.placed(mesh, shape, placements, call)
    if placements.shape != tuple(shape) or placements.mesh != mesh:
        raise LayoutError(
            call, f"the layout is {placements} on {placements.mesh}, the "
            f"tensor has shape {tuple(shape)} on {mesh}",
            "a layout is given for the tensor's own shape and mesh", [str(placements)],
            f"Layout(mesh, {tuple(shape)}, P(...))")
    return placements


def layout_of(tensor: torch.Tensor, mesh: BoundMesh) -> Layout:
    """The layout of an operand; a plain tensor is the same on every rank."""
    if type(tensor) is ShardTensor:
        return tensor._meta.layout
    return Layout.replicated(mesh.abstract, tensor.shape)


def as_sharded(tensor: torch.Tensor, mesh: BoundMesh) -> ShardTensor:
    """A ShardTensor as it is, a DTensor converted, a plain tensor as Replicate on the mesh."""
    tensor = taken(tensor, mesh)
    if type(tensor) is ShardTensor:
        return tensor
    check_given(tensor, "a plain tensor beside ShardTensors, or the gradient of one")
    local = tensor if mesh.here is not None else tensor.new_empty(0)
    return wrap(local, replicated_meta(mesh, tensor))


def check_tensor(value: Any, call: str) -> None:
    """Raise ShardTypeError for a list, a number, an array."""
    if not isinstance(value, torch.Tensor):
        kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
        fix = "torch.from_numpy(array)" if kind.startswith("numpy.nd") else "torch.tensor(value)"
        if isinstance(value, torch.nn.Module):
            fix = "weft.distribute_module(module, mesh, shardings=...), or its parameters"
        raise ShardTypeError(
            call, f"it is of type {kind}", "what becomes a ShardTensor is a torch.Tensor",
            [kind], fix)


def check_plain(value: Any, call: str) -> None:
    """Raise ShardTypeError for what is no plain tensor, UnsupportedOpError as `check_given`."""
    check_tensor(value, call)
    if type(value) is ShardTensor or is_foreign(value):
        what = str(value.sharding) if type(value) is ShardTensor else type(value).__name__
        raise ShardTypeError(
            call, f"it is distributed already, as {what}",
            "what a rank gives is a plain torch.Tensor", [what],
            "x.redistribute(mesh, placements); of a DTensor, weft.from_dtensor(d)")
    check_given(value, call)


def check_given(tensor: torch.Tensor, call: str) -> None:
    """Raise UnsupportedOpError for a plain tensor that is sparse, nested or quantized."""
    if not dense(tensor) or tensor.is_quantized:
        form, fix = str(tensor.layout), "to_dense()"
        if tensor.is_nested:
            form, fix = "nested", "to_padded_tensor(0.0)"
        elif tensor.is_quantized:
            form, fix = "quantized", "dequantize()"
        raise UnsupportedOpError(
            call, f"it is {tensor.dtype} of {form}",
            "a ShardTensor's blocks are dense, and not quantized", [form],
            f"the tensor's {fix}")


def common_strides(layout: Layout, local: torch.Tensor) -> tuple[int, ...] | None:
    """Global strides in the order of the local ones; None if ranks might disagree about it."""
    if any(axes and min(layout.sizes_of(dim)) < 2 <= layout.shape[dim]
           for dim, axes in enumerate(layout.dims)):
        return None
    return strides_like(layout.shape, local.shape, local.stride())


def local_to_sharded(
    local: torch.Tensor, mesh: BoundMesh, layout: Layout, strides: tuple[int, ...] | None = None,
    alias: str | None = None,
) -> ShardTensor:
    """The ShardTensor of a local tensor with this layout and these global strides; `alias` is the
    reason if it represents memory elsewhere."""
    meta = intern(mesh, layout, local.dtype, local.device, local.requires_grad, strides, alias)
    return wrap(local, meta)


def leaf(
    local: torch.Tensor, mesh: BoundMesh, layout: Layout, requires_grad: bool,
    strides: tuple[int, ...] | None = None,
) -> ShardTensor:
    """The leaf of a local tensor that holds the value (not yet a partial value of it)."""
    if layout.is_partial and mesh.here is not None and not local.is_meta:
        to_partial = transition_between(
            mesh, layout.without_partial(), layout,
            order=None if strides is None else order_of(layout.shape, strides),
        )
        local = local if to_partial is None else to_partial(local)
    if local.requires_grad != requires_grad:
        local.requires_grad_(requires_grad)
    track_leaf(local)
    return local_to_sharded(local, mesh, layout, strides)
