"""Calls on a rank outside the mesh: the layouts that the ranks inside decide on, and no data.

Such a rank runs the same program, and its results may come back to a mesh that contains it. So its
tensors have the same layouts, and its graph depends on the same tensors as the graphs inside. A
backward of any order then reaches the same moves to another mesh on every rank that takes part. For
that the op runs on meta tensors of the global shape, and torch shows which tensors its gradient
depends on. `_Entering` and `_Leaving` lead from empty local parts to these tensors and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft import ops
from weft.comm import BoundMesh
from weft.errors import MeshError
from weft.tensor.meta import Meta
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.trace.capture import Op, Trace, meta_like
from weft.tensor.trace.meta_results import has_meta_kernel, known_result
from weft.tensor.trace.trees import fill, flatten, slots_of
from weft.tensor.views.moved import attach_to_base, unwrap_view, written_to
from weft.transport.nodes import with_gradient

__all__ = ["computed", "leave", "twin", "unknown", "write", "written"]

Run = Callable[[Any, Any, Any], Any]


def computed(trace: Trace, op: Op, base: int | None, metas: Mapping[int, Meta]) -> Run:
    """A call whose results have these metas, by slot.

    `base` is the tensor that they are views of, so that writes to them reach it.
    """
    slots = slots_of(op.results)

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        given = flatten((args, kwargs))
        values: dict[int, Any] = dict(enumerate(given))
        viewed = None if base is None else given[base]
        if type(viewed) is not ShardTensor:
            viewed = None
        twins = None
        for place, slot in enumerate(slots):
            meta = metas[slot.index]
            if viewed is not None:
                local = _view(viewed._local, meta.dtype)
            else:
                twins = flatten(_on_twins(trace, op, given)) if twins is None else twins
                local = leave(twins[place], meta.device)
            values[slot.index] = wrap(local, meta)
        return attach_to_base(fill(trace.result, values), func, args, kwargs)

    return run


def written(trace: Trace, op: Op, target: int) -> Run:
    """A call that writes to one of its tensors; `op` is its functional form.

    A plain target would receive the full value, which is not known here: that raises.
    """

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        given = flatten((args, kwargs))
        into = given[target]
        if type(into) is not ShardTensor:
            mesh = next(one._meta.mesh for one in given if type(one) is ShardTensor)
            return unknown(mesh, "a plain target receives the full value")(func, args, kwargs)
        (found,) = flatten(_on_twins(trace, op, given))
        write(into, leave(found, into.device))
        return fill(trace.result, dict(enumerate(given)))

    return run


def unknown(mesh: BoundMesh, reason: str) -> Run:
    """A call whose results cannot be known without data."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", None) or str(func)
        raise MeshError(
            name, f"rank {mesh.rank} is outside {mesh.abstract!r}, and {reason}",
            "a rank outside the mesh runs what needs no data to know the result's shape",
            [mesh.rank], "if x.device_mesh.here is not None: ...")

    return run


def _on_twins(trace: Trace, op: Op, given: Sequence[Tensor]) -> Any:
    twins: list[Any] = [twin(tensor) for tensor in given]
    twins += trace.metas[len(twins):]
    args, kwargs = fill(op.args, twins), fill(op.kwargs, twins)
    entry = ops.find(str(op.overload))
    has_gradient = entry is None or entry.has_meta_gradient
    if has_gradient and has_meta_kernel(op.overload):
        return op.overload(*args, **kwargs)
    with torch.no_grad():
        out: Any = known_result(op.overload, args, kwargs)
        if out is None:
            out = op.overload(*args, **kwargs)
    if has_gradient:
        return out
    # They have one result, whose gradient depends on every operand.
    return sum((one.sum().real for one in flatten((args, kwargs)) if one.requires_grad), out)


def twin(tensor: Tensor) -> Tensor:
    """The tensor at its global shape, without data."""
    made = meta_like(tensor)
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return made
    if type(tensor) is ShardTensor:
        return _entered(unwrap_view(tensor._local), made)
    return made.requires_grad_()  # nothing comes back to a plain tensor on this rank


def leave(found: Tensor, device: torch.device) -> Tensor:
    """The empty local part of what was computed from twins."""
    like = found.detach()
    return with_gradient(
        found, lambda _: torch.empty(0, dtype=like.dtype, device=device),
        lambda grad: _entered(grad, like))


def write(into: Tensor, local: Tensor) -> None:
    """Give a tensor that was written to the history of `local`."""
    if type(into) is ShardTensor:
        into._local.copy_(local)
        written_to(into)


def _entered(local: Tensor, like: Tensor) -> Tensor:
    """From an empty local part to a twin, which is like another tensor."""
    device = local.device
    return with_gradient(local, lambda _: like.detach(), lambda grad: leave(grad, device))


def _view(base: Tensor, dtype: torch.dtype) -> Tensor:
    if base.is_complex() and not dtype.is_complex:
        return torch.view_as_real(base).view(0)
    if dtype.is_complex and not base.is_complex():
        return torch.view_as_complex(base.view(0, 2))
    return base.view(dtype) if dtype != base.dtype else base.view(0)
