"""Ops whose operands autocast casts: an operand that moves is cast before it is sent, which saves
bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from weft.comm import BoundMesh
from weft.tensor.placing.transitions import transition_between
from weft.tensor.trace.calls import overload_named
from weft.tensor.trace.capture import Op, Trace, meta_like, unwatched
from weft.tensor.trace.trees import fill, flatten, slots_of
from weft.transport.transition import Casts, Transition

__all__ = ["cast_of", "cast_on_the_way", "dtype_of", "is_lacking"]

def cast_of(name: str, made: torch.dtype | None, mesh: BoundMesh) -> torch.dtype | None:
    """The dtype that autocast casts float32 operands of an op to, where results are of dtype
    `made`; None where it does not."""
    kind = mesh.kernel_type
    if not torch.is_autocast_enabled(kind) or made is not torch.get_autocast_dtype(kind):
        return None
    return made if _is_cast(name, kind) else None


@cache
def _is_cast(name: str, kind: str) -> bool:
    """Whether autocast knows the op, whose result is of the dtype that it computes in. Those that
    it widens give float32, but for the ones that take a dtype."""
    overload = overload_named(name)
    return overload is not None and torch._C._dispatch_has_kernel_for_dispatch_key(
        overload.name(), f"Autocast{kind.upper()}"
    ) and not any(one.name == "dtype" for one in overload._schema.arguments)


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
    if cast_of(str(op.overload), dtype, mesh):  # a product of meta tensors may take two dtypes
        given = {one.dtype for one in metas.values() if one.is_floating_point()}
        return bool(given - {dtype, torch.float64})
    try:
        with torch.autocast(mesh.kernel_type, enabled=False), unwatched():
            out = op.overload(*fill(op.args, metas), **fill(op.kwargs, metas))
    except RuntimeError:  # of dtypes that differ
        return True
    return next((one.dtype for one in flatten(out) if one.is_floating_point()), None) != dtype
