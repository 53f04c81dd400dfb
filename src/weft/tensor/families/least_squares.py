"""lstsq, whose result torch does not know without data: batches stay sharded, and tall matrices are
solved by their small factors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.ops.tall_factorizations import is_tall
from weft.rules import op, page
from weft.tensor.call.dispatch import mesh_of
from weft.tensor.call.fallback import runner
from weft.tensor.meta import replicated_meta
from weft.tensor.placing.layouts import layout_of, local_to_sharded
from weft.tensor.placing.operands import entered
from weft.tensor.placing.redistribute import redistribute_to
from weft.tensor.shard_tensor import ShardTensor, wrap

__all__ = ["PAGE"]

_L: Any = torch.linalg
_TYPES: Any = torch.return_types
_WHOLE = "a rank solves whole matrices"


def _lstsq(
    input: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> Any:
    """Batches go by blocks with the driver gelsy, tall matrices with any."""
    mesh = mesh_of("lstsq", [one._meta for one in (input, b) if type(one) is ShardTensor])
    of_a = layout_of(input, mesh)
    chosen = driver or ("gelsy" if input.device.type == "cpu" else "gels")
    lead = input.shape[:-2]
    if chosen in _DRIVERS and mesh.here is not None and 0 not in input.shape:
        if input.dim() == 2 and 0 < b.dim() <= 2:
            of_b = layout_of(b, mesh)
            if of_b.dims[0] and not of_a.dims[0]:  # rows are cut as the right-hand sides are
                of_a = Layout.make(of_a.mesh, of_a.shape, (of_b.dims[0], ()), (of_b.cuts[0], None))
            elif of_a.dims[1] and not of_a.dims[0]:
                of_a = Layout.make(of_a.mesh, of_a.shape, (of_a.dims[1], ()))
            if is_tall(of_a):
                whole = input if type(input) is ShardTensor else wrap(
                    input, replicated_meta(mesh, input)
                )
                found = _tall(redistribute_to(whole, of_a, "lstsq"), b, rcond, chosen, mesh)
                if found is not None:
                    return found
        if chosen == "gelsy" and lead and b.shape[: input.dim() - 1] == input.shape[:-1] and (
            any(of_a.dims[:-2]) or (b.dim() > 2 and any(layout_of(b, mesh).dims[: len(lead)]))
        ):
            return _batch(input, b, rcond, mesh)
    if mesh.here is None or input.dim() < 2:
        run = runner(mesh, "its result depends on the data")
        return run(_L.lstsq, (input, b, rcond), {"driver": driver})
    return _whole(input, b, rcond, driver, mesh)


_DRIVERS = ("gels", "gelsy", "gelsd", "gelss")


def _tall(a: Tensor, b: Tensor, rcond: float | None, driver: str, mesh: Any) -> Any:
    """min |Rx - Q'b| is min |Ax - b|, less what no x changes; R has the singular values of A.

    None where the gradient of A is wanted and cannot come this way.
    """
    q, r = _L.qr(a)
    limit = a.shape[0] * torch.finfo(a.dtype).eps if rcond is None else rcond
    small = [
        redistribute_to(one, Layout.replicated(one.sharding.mesh, one.shape), "lstsq")
        for one in (r, q.mH @ b)
    ]
    run = runner(mesh, "its result depends on the data")
    out = run(_L.lstsq, (*small, limit), {"driver": driver})
    if driver != "gels":
        # Ranks may round a singular value to either side of the limit: they decide together.
        found = mesh.everyone().exchange(int(out.rank))
        is_full = min(found) == a.shape[1]
        if not is_full and torch.is_grad_enabled() and a.requires_grad:
            return None  # of Q and R, which have no gradient then
        if not is_full or driver == "gelsy":
            return out
    rest = b - a @ out.solution
    residuals = rest.abs().square().sum(0)
    return _TYPES.linalg_lstsq([out[0], residuals.reshape(-1), *out[2:]])


def _whole(a: Tensor, b: Tensor, rcond: float | None, driver: str | None, mesh: Any) -> Any:
    """Square and wide matrices, of which every rank needs all of each."""
    layouts = [Layout.replicated(mesh.abstract, one.shape) for one in (a, b)]
    out = _L.lstsq(*entered("lstsq", mesh, (a, b), layouts, _WHOLE), rcond, driver=driver)
    return _TYPES.linalg_lstsq([
        local_to_sharded(
            one, mesh, Layout.replicated(mesh.abstract, one.shape), tuple(one.stride()))
        for one in out
    ])


def _batch(a: Tensor, b: Tensor, rcond: float | None, mesh: Any) -> Any:
    """Each block of the batch by itself."""
    lead = a.dim() - 2
    of_a, of_b = layout_of(a, mesh), layout_of(b, mesh)
    like = of_a if any(of_a.dims[:lead]) else of_b
    batch = like.take(range(lead)).without_partial()

    def laid(shape: Any) -> Layout:
        return batch.insert(lead, Layout.replicated(like.mesh, shape[lead:]))

    blocks = entered("lstsq", mesh, (a, b), (laid(a.shape), laid(b.shape)), _WHOLE)
    out = _L.lstsq(*blocks, rcond, driver="gelsy")
    solution = (*a.shape[:-2], a.shape[-1], *b.shape[lead + 1 :])
    none = Layout.replicated(like.mesh, (0,))
    layouts = [laid(solution), none, laid(a.shape[:-2]), none]
    strides: list[Any] = [None] * 4
    if b.dim() > lead + 1:  # columns lie together, in the memory of the right-hand sides
        rows = max(a.shape[-2:])
        strides[0] = [rows * b.shape[-1]] * lead + [1, rows]
        for dim in range(lead - 2, -1, -1):
            strides[0][dim] = strides[0][dim + 1] * max(a.shape[dim + 1], 1)
        strides[0] = tuple(strides[0])
    return _TYPES.linalg_lstsq([
        local_to_sharded(one, mesh, layout, lies)
        for one, layout, lies in zip(out, layouts, strides)
    ])


PAGE = page(op("linalg_lstsq", compose=_lstsq, each_call=True))
