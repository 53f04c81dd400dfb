"""Ops whose operands autocast casts: an operand that moves is cast before it is sent, which saves
bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm import BoundMesh
from weft.tensor.placing.transitions import transition_between
from weft.tensor.trace.capture import Op, Trace, meta_like, unwatched
from weft.tensor.trace.trees import fill, flatten, slots_of
from weft.transport.transition import Casts, Transition

__all__ = ["CAST", "cast_of", "cast_on_the_way", "dtype_of", "is_lacking"]

CAST = frozenset(
    f"aten.{name}.default" for name in (
        "addbmm", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "linear", "matmul", "mm")
)
"""Ops for which autocast casts all operands, on every device."""


def cast_of(name: str, mesh: BoundMesh) -> torch.dtype | None:
    """The dtype that autocast casts float32 operands of an op to; None where it does not."""
    kind = mesh.kernel_type
    if name not in CAST or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast_on_the_way(
    move: Transition | None, own: torch.dtype, dtype: torch.dtype
) -> Transition | None:
    """The transition of an operand that its op casts to `dtype` anyway: the transition casts it
    first, and fewer bytes travel. Unchanged if nothing is sent, or partial values are summed."""
    if move is None or own is not torch.float32 or dtype.itemsize >= own.itemsize:
        return move
    if move.cover is not None or move.src.is_partial or move.dst.is_partial:
        return move
    if not (move.communicates or move.backward_communicates) or move.reduces_only_in_backward:
        return move
    back = own if move.dst_varying else dtype  # what is summed is summed in the wider one
    return transition_between(
        move.mesh, move.src, move.dst, move.src_varying, move.dst_varying, move.order,
        casts=Casts(own, dtype, dtype, back))


def dtype_of(op: Op, trace: Trace, mesh: BoundMesh) -> torch.dtype | None:
    """The dtype that autocast gives an op; None where it is off."""
    if not torch.is_autocast_enabled(mesh.kernel_type):
        return None
    dtypes = [trace.metas[slot.index].dtype for slot in slots_of(op.results)]
    return next((one for one in dtypes if one.is_floating_point), None)


def is_lacking(
    op: Op, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None, mesh: BoundMesh
) -> bool:
    """Whether autocast, which gives an op this dtype, would cast its operands (of `tensors`, by
    their slots): of tensors without memory it casts none."""
    if dtype is None or mesh.device_type != "meta":
        return False
    slots = slots_of((op.args, op.kwargs))
    metas = {slot.index: meta_like(tensors[slot.index]).detach() for slot in slots}
    if str(op.overload) in CAST:  # a product of meta tensors may take two dtypes
        given = {one.dtype for one in metas.values() if one.is_floating_point()}
        return bool(given - {dtype, torch.float64})
    try:
        with torch.autocast(mesh.kernel_type, enabled=False), unwatched():
            out = op.overload(*fill(op.args, metas), **fill(op.kwargs, metas))
    except RuntimeError:  # of dtypes that differ
        return True
    return next((one.dtype for one in flatten(out) if one.is_floating_point()), None) != dtype
