"""Order statistics along a cut dim: kthvalue, median, nanmedian, quantile, nanquantile, mode.

Each rank sorts its block and `split` finds whose element has the rank that is asked for; only
samples travel, and that element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Local
from weft.ops.blocks.reduce import shared_over
from weft.ops.blocks.summaries import Blocks, finish, is_cut, left, reduced, whole_terms
from weft.ops.sorting.sort import as_rows, can_move, is_alone
from weft.ops.sorting.splitting import Row, can_key, first_next, keys_of, split
from weft.rules import Call, Decision

__all__ = ["kthvalue_lookup", "median_lookup", "mode_lookup", "quantile_lookup"]


def _serves(call: Call, layout: Layout, dims: Sequence[int]) -> bool:
    """Whether the dims are cut, and rows few enough that samples of them are less than the blocks,
    where another dim could take the axes."""
    if not is_cut(layout, dims) or 0 in layout.shape or not can_key(call.tensors[0].dtype):
        return False
    if len(dims) > 1 or not can_move(layout, dims[0]):
        return True
    dtype = getattr(torch, call.tensors[0].dtype)
    return layout.shape[dims[0]] * dtype.itemsize > _NUM_SHOWN * 8 * layout.num_shards(dims[0]) ** 2


_NUM_SHOWN = 3 * 64
"""Samples that each block shows of a row, in a few rounds."""


class _Rows:
    """Rows along some dims of this rank's block, sorted, as parts of the whole rows."""

    def __init__(self, blocks: Blocks, x: Tensor) -> None:
        self.blocks, self.row = blocks, Row(blocks.bound, blocks.layout, blocks.dims)
        dims = blocks.dims
        self.last = x if len(dims) == 1 else x.movedim(dims, tuple(range(-len(dims), 0))).flatten(
            -len(dims)
        )
        self.rows, self.others = as_rows(self.last, dims[0] if len(dims) == 1 else -1)
        self.keys, self.order = keys_of(self.rows).sort(dim=-1, stable=True)

    def num_nans(self) -> Tensor:
        """Per row, how many NaNs the whole row has."""
        if not self.rows.is_floating_point():
            return torch.zeros(len(self.rows), dtype=torch.long, device=self.rows.device)
        return self.row.gather(self.rows.isnan().sum(-1)).sum(0)

    def pick(self, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """The elements of these ranks (rows, cuts) and, of one dim, their places; in the dims of
        the tensor, cuts standing where the (first) dim stands."""
        before = split(self.row, self.keys, ranks)
        at = before[self.row.mine]
        if not self.rows.shape[1]:
            places = keys = torch.zeros_like(at)
            values = self.rows.sum(-1, keepdim=True).to(self.rows.dtype).expand_as(at)
        else:
            inside = at.clamp(max=self.rows.shape[1] - 1)
            places, keys = self.order.gather(-1, inside), self.keys.gather(-1, inside)
            values = self.rows.gather(-1, places)
        owned = first_next(self.row, before, keys) == self.row.mine
        start = 0
        if len(self.blocks.dims) == 1:
            start, _ = self.blocks.layout.interval(self.blocks.dims[0], self.blocks.mine)
        values = torch.where(owned, values, torch.zeros((), dtype=values.dtype))
        places = torch.where(owned, places + start, 0)
        return self._joined(values), self._joined(places)

    def _joined(self, own: Tensor) -> Tensor:
        """What one of the blocks has, and the others have zero in its place."""
        shaped = own.view(*self.others, own.shape[-1]).movedim(-1, self.blocks.dims[0])
        for dim in self.blocks.dims[1:]:
            shaped = shaped.unsqueeze(dim)
        return self.blocks.gather(shaped)[0].sum(0).to(own.dtype)


def kthvalue_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """kthvalue along a cut dim."""
    layout = layouts[0]
    if not layout.ndim:
        return None
    k, dim, keepdim = call.args[1], call.args[2] % layout.ndim, bool(call.args[3])
    if not _serves(call, layout, (dim,)):
        return None

    def function(blocks: Blocks, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = _Rows(blocks, x)
        return rows.pick(torch.full((len(rows.rows), 1), k - 1, device=x.device))

    return finish(call, layout, (dim,), keepdim, function)


def median_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """median and nanmedian, along a cut dim or of everything: the lower of two middle elements."""
    layout = layouts[0]
    everything, ignores = call.op.endswith(".default"), call.op.startswith("aten.nanmedian")
    dims = reduced(layout, None if everything else call.args[1])
    keepdim = not everything and bool(call.args[2])
    if not layout.ndim or not _serves(call, layout, dims):
        return None
    if everything and wants_grad[0]:
        find = torch.nanmedian if ignores else torch.median
        return Composite(
            lambda x: shared_over(x, find(x.detach()).view([1] * x.dim()), dims).squeeze(dims)
        )

    def function(blocks: Blocks, x: Tensor) -> Any:
        rows = _Rows(blocks, x)
        nans, count = rows.num_nans(), sum(blocks.sizes)
        ranks = (count - nans - 1).clamp(min=0) // 2
        if not ignores:  # the first NaN, if there is one
            ranks = torch.where(nans > 0, count - nans, ranks)
        values, places = rows.pick(ranks.unsqueeze(-1))
        return values if everything else (values, places)

    return finish(call, layout, dims, keepdim, function)


def mode_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """mode along a cut dim, where no other dim can take its axes: the longest run when sorted."""
    layout = layouts[0]
    if not layout.ndim:
        return None
    dim, keepdim = call.args[1] % layout.ndim, bool(call.args[2])
    if not is_alone(call, layout, dim):
        return None

    def mode(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        values, places = torch.sort(x, dim=dim, stable=True)
        more, fixed = x.shape[dim] - 1, values.detach()
        at = torch.ones_like(places).cumsum(dim)
        begins = fixed.narrow(dim, 1, more) != fixed.narrow(dim, 0, more)
        starts = torch.cat([at.narrow(dim, 0, 1), torch.where(begins, at.narrow(dim, 1, more), 0)],
                           dim)
        best = (at - starts.cummax(dim)[0]).argmax(dim, keepdim=True)
        found = values.gather(dim, best), places.gather(dim, best)
        return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))

    return Composite(mode)


def quantile_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """quantile and nanquantile along a cut dim, or of everything."""
    layout = layouts[0]
    levels, given, keepdim = call.args[1:4]
    dims = reduced(layout, given)
    if not layout.ndim or not _serves(call, layout, dims) or True in wants_grad[1:]:
        return None
    ignores, mode = call.op.startswith("aten.nanquantile"), call.kwargs["interpolation"]
    layout = whole_terms(layout)
    numbered = len(layouts) > 1 and bool(call.tensors[1].shape)
    shape = call.results[0].shape[1:] if numbered else call.results[0].shape
    result = left(shape, layout, dims, bool(keepdim))
    if numbered:
        result = Layout.make(
            layout.mesh, call.results[0].shape, ((), *result.dims), (None, *result.cuts)
        )
    operands = (layout, *(Layout.replicated(layout.mesh, one.shape) for one in layouts[1:]))

    def bind(bound: BoundMesh) -> Callable[..., Tensor]:
        blocks = Blocks(bound, layout, dims)

        def local(x: Tensor, *tensors: Tensor) -> Tensor:
            q = tensors[0] if tensors else torch.tensor(levels, dtype=x.dtype, device=x.device)
            out = _quantiles(_Rows(blocks, x), q.reshape(-1), ignores, mode, sum(blocks.sizes))
            # The levels stand where the first of the dims stood: to the front.
            out = out.movedim(dims[0], 0)
            out = out.unsqueeze(dims[0] + 1) if keepdim else out.squeeze(dims[1:])
            return out if numbered else out[0]

        return local

    axes = tuple(axis for dim in dims for axis in layout.dims[dim])
    return Local(Decision(operands, (result,)), bind, communicates=axes)


def _quantiles(rows: _Rows, q: Tensor, ignores: bool, mode: str, count: int) -> Tensor:
    """As torch computes them: between the elements of the two nearest ranks."""
    if not bool(((q >= 0) & (q <= 1)).all()):
        raise RuntimeError("quantile() q values must be in the range [0, 1]")
    nans = rows.num_nans().unsqueeze(-1)
    if ignores:
        ranks = (q * (count - nans - 1)).clamp(min=0)
    else:
        ranks = torch.where(nans > 0, count - 1, (q * (count - 1)).expand(len(nans), -1))
    if mode in ("lower", "higher", "nearest"):
        name = {"lower": "floor", "higher": "ceil", "nearest": "round"}[mode]
        return rows.pick(getattr(torch, name)(ranks).long())[0]
    below, above = ranks.long(), ranks.ceil().long()
    weights = torch.full_like(ranks, 0.5) if mode == "midpoint" else ranks - below
    low, high = rows.pick(torch.cat([below, above], -1))[0].chunk(2, rows.blocks.dims[0])
    placed = weights.view(*rows.others, weights.shape[-1]).movedim(-1, rows.blocks.dims[0])
    for dim in rows.blocks.dims[1:]:
        placed = placed.unsqueeze(dim)
    return low.lerp(high, placed.to(low.dtype))
