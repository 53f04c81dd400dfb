"""What depends on many gradients: each rank looks at its blocks, then one collective for all.

Norms (`clip_grad_norm_`): torch takes the norm of each gradient, and the norm of these. A norm of a
sharded gradient is a reduction over ranks, so that would be one collective per parameter. Here each
rank takes the norm of the blocks that it keeps (of replicas the first coordinate does), all ranks
gather these numbers, and each takes the norm of them, in one order, so that all get the same bits.
Gradients may lie on several meshes.

Gradient scaling (`torch.amp.GradScaler`): torch's op divides gradients by the scale in place and
says whether one of them is not finite. Here each rank does so with its blocks, and the verdicts are
reduced: either all ranks take the step or none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh, Communicator
from weft.errors import UnsupportedOpError
from weft.tensor.meta import replicated_meta
from weft.tensor.modes import is_strict
from weft.tensor.placing.foreign import is_foreign
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.trace.trees import local_of
from weft.tensor.views.moved import Moved, written_to
from weft.transport import collective, traffic

__all__ = ["clip_with_norm", "total_norm", "unscale"]

_unscale: Any = torch._amp_foreach_non_finite_check_and_unscale_


def total_norm(
    original: Any, tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.get_total_norm`.

    Returns:
        A replicated ShardTensor; of gradients on several meshes a plain tensor.
    """
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    order = float(norm_type)
    if not order > 0 or is_strict() or not _are_values(tensors):
        return original(tensors, norm_type, error_if_nonfinite, foreach)
    meshes = list({id(one._meta.mesh): one._meta.mesh for one in tensors
                   if type(one) is ShardTensor}.values())
    with torch.no_grad():
        total = _gathered(tensors, meshes, order, foreach is not False)
    if error_if_nonfinite and total.numel() and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {order} for gradients from `parameters` is non-finite, so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite "
            "norm anyway, set `error_if_nonfinite=False`"
        )
    if len(meshes) > 1:
        return total
    number = total if meshes[0].here is not None else torch.empty((), dtype=total.dtype)
    return wrap(total, replicated_meta(meshes[0], number))


def clip_with_norm(
    original: Any, parameters: Any, max_norm: float, total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """`torch.nn.utils.clip_grads_with_norm_`: every rank scales its blocks."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [one.grad for one in parameters if one.grad is not None]
    total = local_of(total_norm)
    known = type(total_norm) is not ShardTensor or total_norm.sharding.is_replicated
    if not known or not _are_values(grads):
        return original(parameters, max_norm, total_norm, foreach)
    if not total.numel():  # outside the mesh
        return
    with torch.no_grad():
        factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        for same in _by_kind([local_of(grad) for grad in grads]):
            if foreach is False:
                for local in same:
                    local.mul_(factor)
            else:
                torch._foreach_mul_(same, factor)
    for grad in grads:
        if type(grad) is ShardTensor:
            written_to(grad)


def _are_values(tensors: Sequence[Tensor]) -> bool:
    """Whether they are ShardTensors and plain tensors, none of them partial or a view of moved
    data."""
    sharded = [one for one in tensors if type(one) is ShardTensor]
    return bool(sharded) and not any(map(is_foreign, tensors)) and not any(
        one._meta.layout.is_partial or one._meta.alias is not None or type(one._local) is Moved
        for one in sharded
    )


def _gathered(
    tensors: Sequence[Tensor], meshes: Sequence[BoundMesh], order: float, foreach: bool
) -> Tensor:
    used = sorted({axis for one in tensors if type(one) is ShardTensor
                   for axis in one._meta.layout.sharded_axes})
    dtypes = [one.abs().dtype if one.dtype.is_complex else one.dtype for one in (
        torch.empty(0, dtype=one.dtype) for one in tensors)]
    dtype = reduce(torch.promote_types, dtypes)
    comm: Communicator | None = None
    if len(meshes) > 1:
        comm = meshes[0].world.across(*meshes)
    elif meshes[0].here is None:
        return torch.empty(0, dtype=dtype, device=meshes[0].device)
    elif used:
        comm = meshes[0].comm(tuple(used))
    kept = [
        local_of(one) for one in tensors if comm is None or _keeps(one, comm, used, len(meshes))
    ]
    wide = torch.promote_types(dtype, torch.float32)
    norms = _norms(kept, order, wide, foreach)
    mine = torch.linalg.vector_norm(torch.stack(norms), order) if norms else torch.zeros(
        (), dtype=wide, device=meshes[0].device)
    if comm is None:
        return mine.to(dtype)
    with traffic.label("clip_grad_norm_", "the norm of all gradients"):
        every = collective(mine, comm, "gather")
    return torch.linalg.vector_norm(every, order).to(dtype)


def _norms(kept: Sequence[Tensor], order: float, wide: torch.dtype, foreach: bool) -> list[Tensor]:
    found: list[Tensor] = []
    for same in _by_kind([local for local in kept if local.numel()]):
        to = wide.to_complex() if same[0].dtype.is_complex else wide
        if foreach and not same[0].dtype.is_complex:
            found += torch._foreach_norm(same, order, dtype=to)
        else:
            found += [torch.linalg.vector_norm(local.to(to), order) for local in same]
    return found


def _by_kind(locals_: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[Any, list[Tensor]] = {}
    for local in locals_:
        kinds.setdefault((local.device, local.dtype), []).append(local)
    return list(kinds.values())


def _keeps(tensor: Tensor, comm: Communicator, used: Sequence[int], num_meshes: int) -> bool:
    """Whether this rank counts its block: of replicas one rank does."""
    if type(tensor) is not ShardTensor:
        return comm.index == 0
    mesh, layout = tensor._meta.mesh, tensor._meta.layout
    if mesh.here is None:
        return False
    axes = range(mesh.ndim) if num_meshes > 1 else used
    return not any(mesh.here[axis] for axis in axes if layout.on(axis) is None)


def unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Any) -> None:
    """`torch._amp_foreach_non_finite_check_and_unscale_`; one float32 is reduced over the mesh.
    Values of a partial gradient are not known: UnsupportedOpError."""
    sharded = [grad for grad in grads if type(grad) is ShardTensor]
    partial = [str(grad.sharding) for grad in sharded if grad.sharding.is_partial]
    if partial or type(found_inf) is ShardTensor or type(inv_scale) is ShardTensor:
        raise UnsupportedOpError(
            "GradScaler.unscale_", f"{len(partial)} of {len(grads)} gradients are partial"
            if partial else "the scale, or found_inf, is a ShardTensor",
            "a partial gradient has no value to check before it is reduced, and the scale "
            "is plain", partial or [str(type(inv_scale).__name__)],
            "x.grad = x.grad.redistribute(placements=[Replicate()])")
    _unscale([local_of(grad) for grad in grads], found_inf, inv_scale)
    for grad in sharded:
        written_to(grad)
    meshes = [grad._meta.mesh for grad in sharded if not grad.sharding.is_replicated]
    for mesh in dict.fromkeys(meshes):
        if mesh.here is not None:
            with traffic.label("GradScaler.unscale_", "whether a gradient is inf or nan"):
                found_inf.copy_(mesh.everyone().all_reduce(found_inf, "max"))
