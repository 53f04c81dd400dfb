"""An op that nothing covers: its operands are gathered, and every rank computes the result.

It serves functional and in-place ops, and those whose result depends on data. All ranks draw the
same random numbers. One warning per op names the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.tensor.call import outside
from weft.tensor.call.in_place import check_writable
from weft.tensor.meta import expanded_dims, replicated_meta
from weft.tensor.placing.draw import torch_draws
from weft.tensor.placing.left_whole import tell
from weft.tensor.placing.operands import entered, share_memory
from weft.tensor.placing.transitions import transition_between
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.trace.calls import returned, written_by
from weft.tensor.trace.capture import Op, Trace, check_dense
from weft.tensor.trace.trees import fill, flatten, local_of, map_tensors, substitute
from weft.tensor.versions import counted_version, write_counted
from weft.tensor.views.inverse import OVERLAP
from weft.tensor.views.moved import attach_to_base, unwrap_view, written_to

__all__ = ["FIX", "of_op", "on_full", "runner"]


def _replicate(tensor: torch.Tensor, mesh: BoundMesh, name: str) -> torch.Tensor:
    """The full tensor, plain, on every rank; differentiable (the gradient is replicated)."""
    if type(tensor) is not ShardTensor:
        return tensor  # of any form: it may be sparse
    full = Layout.replicated(mesh.abstract, tensor.shape)
    return entered(name, mesh, (tensor,), (full,), "no rule covers the op")[0]


FIX = "weft.register_rule(op, ...), or redistribute to Replicate yourself"


def runner(
    mesh: BoundMesh, reason: str, writes: Collection[int] = (), fix: str = FIX
) -> Callable[[Any, Any, Any], Any]:
    """A function that carries out calls by fallback.

    `writes`: which of the tensors the op writes to, as far as its schema is known: some ops write
    without counting a version. `fix`: the advice of the warning.
    """
    if mesh.here is None:
        return outside.unknown(mesh, reason)

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", None) or str(func)
        tensors = flatten((args, kwargs))
        tell(name, reason, tensors, fix)
        told = {id(tensor) for tensor in written_by(func, args, kwargs)}
        written = {*writes, *(at for at, tensor in enumerate(tensors) if id(tensor) in told)}
        result = on_full(name, mesh, func, args, kwargs, written)
        return attach_to_base(result, func, args, kwargs)

    return run


def on_full(
    name: str, mesh: BoundMesh, func: Callable[..., Any], args: Any, kwargs: Any,
    writes: Collection[int] = (), are_views: bool = True,
) -> Any:
    """A function on full tensors, the same on every rank; its results are replicated.

    What it writes to comes back to the operands: those whose version counts a write, and `writes`.
    Results that share memory with a gathered operand say so, if they `are_views`.
    """
    full: dict[int, torch.Tensor] = {}
    tensors = flatten((args, kwargs))
    together = share_memory(tensors)

    def open_(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in full:
            gathered = _replicate(tensor, mesh, name)
            if together and gathered is not local_of(tensor):
                gathered = gathered.clone()  # else a write to one counts as one to both
            full[id(tensor)] = gathered
        return full[id(tensor)]

    before = {id(one): (counted_version(one), one.grad_fn) for one in map(open_, tensors)}
    opened, named = substitute((args, kwargs), map(open_, tensors))
    with torch_draws(mesh):
        out = func(*opened, **named)
    known, views = {}, {}
    for at, tensor in enumerate(tensors):
        local = full[id(tensor)]
        version, node = before[id(local)]
        if counted_version(local) != version or at in writes:
            is_recorded = local.grad_fn is not node  # a Function's forward writes without a graph
            with nullcontext() if is_recorded else torch.no_grad():
                _write_back(name, tensor, local, mesh)
        known[id(local)] = tensor
        if are_views and local is not local_of(tensor):
            views[unwrap_view(local).untyped_storage()._cdata] = name
    return map_tensors(lambda local: _wrapped(name, local, known, mesh, views), out)


def of_op(
    run: Callable[[Any, Any, Any], Any], op: Op, trace: Trace
) -> Callable[[Any, Any, Any], Any]:
    """`run` of an op, in place of the called function."""

    def run_op(func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs))
        out = run(op.overload, fill(op.args, tensors), fill(op.kwargs, tensors))
        return returned(trace, tensors, op.results, out)

    return run_op


def _wrapped(
    name: str, local: torch.Tensor, known: dict[int, torch.Tensor], mesh: BoundMesh,
    views: dict[int, str],
) -> Any:
    """A result; one that shares memory with a gathered operand is a view whose data moved."""
    if id(local) in known:
        return known[id(local)]
    check_dense(local, name)
    meta = replicated_meta(mesh, local)
    alias = views.get(unwrap_view(local).untyped_storage()._cdata)
    return wrap(local, meta if alias is None else meta.replace(alias=alias))


def _write_back(name: str, tensor: torch.Tensor, full: torch.Tensor, mesh: BoundMesh) -> None:
    """Bring what was written to `full`, the operand's value on every rank, to the operand."""
    if type(tensor) is not ShardTensor:
        return
    check_writable(name, tensor)
    if tensor._local is not full:
        if tensor.numel() and expanded_dims(tensor):
            raise RuntimeError(OVERLAP)  # a rank that has no element would go on
        back = transition_between(
            mesh, Layout.replicated(mesh.abstract, tensor.shape), tensor._meta.layout
        )
        write_counted(tensor._local, full if back is None else back(full), full)
    written_to(tensor)
