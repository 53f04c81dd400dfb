"""segment_reduce: the sum, mean, product or extremum of each run of rows.

Where the rows are sharded, each rank reduces the rows that it has of each segment, and the shards'
results are joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops.precision import widened
from weft.ops.scatter_reductions import extremum_at
from weft.rules import Call, op, page, rule
from weft.transport import Shards

__all__ = ["PAGE"]


def _segments(call: Call, wants_grad: Sequence[bool]) -> str:
    """Lengths may have batch dims, which are those of the data. Where no rank has a part of them,
    they stay whole: each rank sees whether all of them fit."""
    if _ALSO.get(call.get("reduce"), call.get("reduce")) not in _START:
        raise RuntimeError("reduce argument must be either sum, prod, mean, amax or amin, got "
                           f"{call.get('reduce')}")
    dims = range(call.get("axis") or 0)
    if not dims:
        return "s~ ..., [n!], [i!], [m!] -> t! ..."
    lead = " ".join([f"b{dim}~>0" for dim in dims])
    is_cut = any(any(layout.dims[:-1]) for layout in call.layouts[1:])
    told = lead if is_cut else " ".join([f"c{dim}!" for dim in dims])
    made = " ".join([f"b{dim}" for dim in dims])
    return f"{lead} s! ..., [{told} n!], [{told} i!], [{told} m!] -> {made} t! ..."


def _segment_reduce(
    shards: Shards, x: Tensor, reduce: str, *, lengths: Tensor | None = None,
    indices: Tensor | None = None, offsets: Tensor | None = None, axis: int = 0,
    unsafe: bool = False, initial: Any = None,
) -> Tensor:
    """Each shard's result for each segment, joined. Of batches, each by itself."""
    reduce = _ALSO.get(reduce, reduce)
    if lengths is not None and offsets is None and not unsafe:
        _check(shards, lengths, axis)
    if axis:
        return torch.segment_reduce(
            x, reduce, lengths=_own(shards, x, lengths), indices=_own(shards, x, indices),
            offsets=_own(shards, x, offsets), axis=axis, unsafe=unsafe, initial=initial)
    if lengths is not None and offsets is None:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    assert offsets is not None
    num = offsets.shape[0] - 1
    if offsets.is_cpu and num > 0 and int(offsets.diff().min()) < 0:  # torch's error, by its kernel
        torch.segment_reduce(x.new_zeros(1), reduce, offsets=offsets.new_tensor([1, 0]))
    row = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype) + shards.starts[0]
    # One more segment on both sides takes the rows that no segment names.
    ids = torch.searchsorted(offsets.contiguous(), row, right=True)
    start = _START[reduce] if initial is None else initial
    rows, beside = widened(x), [1] * (x.dim() - 1)
    zeros = rows.new_zeros(num + 2, *x.shape[1:])
    places = ids.reshape(-1, *beside).expand_as(rows)
    if reduce == "prod":
        own = torch.ones_like(zeros).scatter_reduce(0, places, rows, "prod")
        out = shards.gather(own)[0].prod(0).narrow(0, 1, num) * start
        return out.to(x.dtype)
    count = offsets.diff().reshape(-1, *beside)
    if reduce in ("sum", "mean"):
        out = shards.psum(zeros.index_add(0, ids, rows).narrow(0, 1, num)) + start
        if reduce == "mean":
            empty = start if initial is not None else torch.nan
            out = torch.where(count > 0, out / count.clamp(min=1), empty)
        return out.to(x.dtype)
    nothing, kept = torch.full_like(zeros, torch.nan), torch.zeros_like(zeros, dtype=torch.bool)
    out = extremum_at(shards, nothing, 0, places, rows, reduce == "max", kept).narrow(0, 1, num)
    beaten = out < start if reduce == "max" else out > start
    return torch.where((count == 0) | beaten, start, out).to(x.dtype)


_START = {"sum": 0, "mean": 0, "prod": 1, "max": -torch.inf, "min": torch.inf}
"""What a segment without rows comes to, but for a mean."""

_ALSO = {"amax": "max", "amin": "min"}
"""Other names."""


def _own(shards: Shards, x: Tensor, told: Tensor | None) -> Tensor | None:
    """The rows of lengths or offsets that are about this rank's batches."""
    if told is None:
        return None
    for dim in range(told.dim() - 1):
        if told.shape[dim] != x.shape[dim]:
            told = told.narrow(dim, shards.starts[dim], x.shape[dim])
    return told


def _check(shards: Shards, lengths: Tensor, axis: int) -> None:
    """Raise torch's errors, on all ranks also where each has lengths of its own. Unknown ones, of a
    dry run, fit."""
    if lengths.is_meta:
        return
    is_negative = lengths.numel() > 0 and int(lengths.min()) < 0
    fits = bool((lengths.sum(-1) == shards.layout.shape[axis]).all())
    fault = torch.tensor(2 if is_negative else 0 if fits else 1)
    if any(any(layout.dims) for layout in shards.operands[1:]):
        fault = shards.pmax(fault.to(lengths.device))
    if fault:
        raise RuntimeError(_FAULTS[int(fault)])


_FAULTS = (
    "", "segment_reduce(): Expected all rows of lengths along axis to sum to "
    "data.size(lengths.dim()-1) when !unsafe.", "lengths contains negative value!",
)


def _result(
    x: Tensor, reduce: str, *, lengths: Tensor | None = None, indices: Tensor | None = None,
    offsets: Tensor | None = None, axis: int = 0, **_: Any,
) -> Tensor | None:
    """A row for each segment; torch has no meta kernel."""
    given = lengths if offsets is None else offsets
    if given is None or axis < 0 or given.dim() != axis + 1 or not x.is_floating_point() or (
        x.shape[:axis] != given.shape[:axis] or x.dim() <= axis
        or reduce not in ("sum", "mean", "max", "min", "prod")
    ):
        return None
    num = given.shape[axis] - (offsets is not None)
    return x.new_empty((*given.shape[:axis], num, *x.shape[axis + 1 :]))


PAGE = page(
    op("segment_reduce", rule(_segments), kernel=_segment_reduce, result=_result),
)
