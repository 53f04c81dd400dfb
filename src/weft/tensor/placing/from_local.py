"""ShardTensors from local tensors.

If the arguments of `from_local` do not say how the blocks make up the tensor (`sizes`), all ranks
of the mesh exchange that once (`agreed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import LayoutError, WeftError
from weft.planner import gradient_layout
from weft.tensor.meta import contiguous_strides
from weft.tensor.placing.agreed import agreed_layout, check_over_ranks
from weft.tensor.placing.arguments import mesh_and_placements, mesh_for
from weft.tensor.placing.layouts import (
    check_plain,
    common_strides,
    local_to_sharded,
)
from weft.tensor.placing.redistribute import placed_gradients
from weft.tensor.placing.sizes import form_of, is_asked, said_layout
from weft.tensor.placing.transitions import transition_between
from weft.tensor.shard_tensor import ShardTensor
from weft.transport.facts import partial_axes
from weft.transport.nodes import gradient_through, untransformed
from weft.transport.order import laid, order_due

__all__ = ["from_local"]


@untransformed
def from_local(
    local: torch.Tensor,
    device_mesh: Any,
    placements: Any,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    sizes: Any = "infer",
    sharding_shapes: Any = None,
    sync: bool = False,
    grad_placements: Any = None,
    region: str | None = None,
) -> ShardTensor:
    """See `ShardTensor.from_local`; `region`: the call that errors name instead."""
    device_mesh, placements = mesh_and_placements(device_mesh, placements)
    mesh = mesh_for(device_mesh, placements, "from_local(device_mesh)")
    if sharding_shapes in ("infer", "chunk") and sizes in ("infer", sharding_shapes):
        sizes, sharding_shapes = sharding_shapes, None  # PhysicsNeMo's name
    argument = region or "from_local(placements)"
    asks = is_asked(placements, shape, sizes, sharding_shapes) and mesh.here is not None
    fault: WeftError | None = None
    layout = form = None
    try:
        check_plain(local, "from_local(local_tensor)")
        if asks:
            form = form_of(mesh, local.dim(), placements, argument)
        else:
            layout = said_layout(
                mesh, local.shape, placements, shape, sizes, sharding_shapes, argument)
    except WeftError as error:
        fault = error
    if asks:
        call = f'from_local(sizes="{sizes}")'
        layout, strides = agreed_layout(call, mesh, local, form, sizes, fault)
        stride = strides if stride is None else stride
    compared = run_check or (mesh.world.debug.on and not sync)
    if compared and mesh.here is not None:
        check_over_ranks(mesh, local, layout, fault, region)
    if fault is not None:
        raise fault
    assert layout is not None
    if local.device != mesh.device and not local.is_meta:
        local = local.to(mesh.device)
    if mesh.here is None and local.shape != (0,):
        local = local.flatten()[:0].clone()
    local = local.resolve_conj().resolve_neg()  # other ranks' blocks may not be lazy
    _check_local(local, mesh, layout)
    if sync:
        local = _synced(local, mesh, layout)
    # What happens to the ShardTensor (requires_grad_, a gradient) must not affect the argument.
    keeps = local.requires_grad or forward_ad._current_level >= 0  # `detach` drops a tangent
    local = local.view_as(local) if keeps else local.detach()
    if grad_placements is not None:
        local = _gradients_placed(local, mesh, layout, grad_placements)
    return local_to_sharded(*_with_global_strides(local, mesh, layout, stride))


def _with_global_strides(
    local: torch.Tensor, mesh: BoundMesh, layout: Layout, stride: Sequence[int] | None
) -> tuple[torch.Tensor, BoundMesh, Layout, tuple[int, ...] | None]:
    """The local tensor as the global strides require, and these strides: None is row-major.

    If they are not given, they have the order of the local strides, if every rank sees the same;
    else the local tensor is copied. So is one whose order differs from the given one, or with gaps.
    """
    strides = None if stride is None else tuple(stride)
    if strides is None and not local.is_contiguous():
        strides = common_strides(layout, local)
    due = order_due(layout.shape, strides or contiguous_strides(layout.shape), local)
    if due is not None:
        local = laid(local, due)
    if strides == contiguous_strides(layout.shape):
        strides = None
    return local, mesh, layout, strides


def _gradients_placed(
    local: torch.Tensor, mesh: BoundMesh, layout: Layout, placements: Any
) -> torch.Tensor:
    """`local`, whose gradients return in the placements that the user has given."""
    seen = placed_gradients(mesh, layout, placements, local.dtype, "from_local")
    seen = seen.without_partial(  # the value is one partial value of its own mean
        axis for axis, kind in enumerate(seen.partial) if kind == "avg"
    )
    partial = partial_axes(layout)
    back = transition_between(mesh, gradient_layout(layout), seen, partial, partial)
    if back is None or not (local.requires_grad and torch.is_grad_enabled()):
        return local
    return gradient_through(local, back)


def _check_local(local: torch.Tensor, mesh: BoundMesh, layout: Layout) -> None:
    if mesh.here is None:
        return
    expected = layout.local_shape_at(mesh.here)
    if tuple(local.shape) != expected:
        raise LayoutError(
            "from_local(local_tensor)", f"rank {mesh.rank} gives shape "
            f"{tuple(local.shape)}, the layout {layout} gives it {expected}",
            "a local tensor has the shape that the layout gives its rank", [mesh.rank],
            'from_local(..., sizes="infer"), or sizes={dim: (...)}')


def _synced(local: torch.Tensor, mesh: BoundMesh, layout: Layout) -> torch.Tensor:
    """Replicas take the values of the first coordinate of the axes that replicate."""
    axes = layout.free_axes
    if not axes or mesh.here is None:
        return local
    with torch.no_grad():
        got = mesh.comm(axes).broadcast(local.detach().contiguous().flatten(), 0)
        local.data.copy_(got.view(local.shape))
    return local
