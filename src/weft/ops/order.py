"""Sorts and order statistics: sort, argsort, msort, topk, kthvalue, median, nanmedian, mode,
quantile, nanquantile.

Along a sharded dim each rank sorts its shard, and `split` finds which of its elements are among the
first k of all; only samples are sent. A sort then sends elements to the shards where they belong;
an order statistic sends the requested element. Where another dim can take over the mesh axes, whole
rows are cheaper: the rule moves the axes there, and torch sorts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.core.dtypes import itemsize
from weft.ops.extrema import shared
from weft.ops.places import resized
from weft.ops.sorting.sort import Sorting, as_rows, narrowed
from weft.ops.sorting.splitting import BlockGroup, can_key, first_next, keys_of, split
from weft.ops.sorting.unsigned import from_order, to_order
from weft.rules import Call, Entry, Text, op, page, rule
from weft.rules.factors import dim_list, sharded_along
from weft.transport import Shards

__all__ = ["PAGE"]


# Which is cheaper, a kernel or whole rows.


def _entry(
    names: str, *texts: Text, serves: Callable[[Call], bool], kernel: Callable[..., Any],
    default: int | None = None,
) -> Entry:
    """An op whose kernel combines the shards of dims with `~` where it `serves`; elsewhere they are
    whole."""
    whole = [_of_whole_rows(text) for text in texts]
    return op(
        names,
        rule(*texts, along="dim", default=default,
             serves=lambda call: not sharded_along(call, default)),
        rule(*texts, along="dim", default=default, serves=serves, by_size=True),
        rule(*whole, along="dim", default=default), kernel=kernel)


def _of_whole_rows(text: Text) -> Text:
    if isinstance(text, str):
        return text.replace("~", "!")

    def found(call: Call, wants_grad: Sequence[bool]) -> Any:
        return _of_whole_rows(text(call, wants_grad))  # type: ignore[arg-type]

    found.__doc__ = text.__doc__
    return found


def _has_no_room(call: Call) -> bool:
    """Where no other dim is long enough for the axes."""
    (layout,), dim = call.layouts, call.get("dim", -1)
    return can_key(call.tensors[0].dtype) and 0 not in layout.shape and not _can_move(
        layout, dim % layout.ndim)


def _can_move(layout: Layout, dim: int) -> bool:
    """Whether another dim is long enough for the axes that shard this one."""
    ranks = layout.num_shards(dim)
    return any(
        layout.shape[other] // layout.num_shards(other) >= ranks
        for other in range(layout.ndim) if other != dim
    )


def _few_samples(call: Call) -> bool:
    """Where no other dim is long enough for the axes, or samples take fewer bytes than rows."""
    layout = call.layouts[0]
    dims = dim_list(call.get("dim"), layout.ndim)
    if not layout.ndim or 0 in layout.shape or not can_key(call.tensors[0].dtype):
        return False
    first, *others = dims
    if others or not _can_move(layout, first):
        return True
    row_nbytes = layout.shape[first] * itemsize(call.tensors[0].dtype)
    return row_nbytes > _NUM_SHOWN * 8 * layout.num_shards(first) ** 2


_NUM_SHOWN = 3 * 64
"""Samples of a row that each shard shows, over a few rounds."""


# Sorts.


def _sort(
    shards: Shards, x: Tensor, dim: int = -1, descending: bool = False, *,
    stable: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Each shard is sorted; elements are sent to the shard where they belong and merged there."""
    (dim,) = shards.dims
    rows, others = as_rows(to_order(x), dim)
    done = Sorting(BlockGroup(shards), rows, descending, shards.layout.cuts_of(dim))
    values, places = done.values, done.places()
    del done, rows  # and with it the orders, which are as large as what is left
    values, places = (
        one.view(*others, x.shape[dim]).movedim(-1, dim) for one in (values, places.long())
    )
    return from_order(values, x.dtype), places


def _topk(
    shards: Shards, x: Tensor, k: int, dim: int = -1, largest: bool = True, in_order: bool = True
) -> tuple[Tensor, Tensor]:
    """Each shard's own k elements are gathered; the k of the whole are among them."""
    (dim,) = shards.dims
    each = [min(k, size) for size in shards.sizes]
    values, places = x.topk(each[shards.index], dim, largest, in_order)
    candidates = []
    for own in (values, places + shards.starts[dim]):
        (every,) = shards.gather(resized(own, dim, max(each)))
        parts = [part.narrow(dim, 0, count) for part, count in zip(every, each)]
        candidates.append(torch.cat(parts, dim))
    values, which = candidates[0].topk(k, dim, largest, in_order)
    return values, candidates[1].gather(dim, which)


def _is_small(call: Call) -> bool:
    """Where gathering each shard's own k takes no more bytes than a sort."""
    if not sharded_along(call, -1):
        return True
    (layout,), k, dim = call.layouts, call.get("k"), call.get("dim", -1)
    ranks, nbytes = layout.num_shards(dim), itemsize(call.tensors[0].dtype)
    return (ranks - 1) * k * (nbytes + 8) <= layout.shape[dim] / ranks * (nbytes + 4)


def _cut_off(x: Tensor, k: int, dim: int, largest: bool, in_order: bool) -> Any:
    """The first of a sort, where another way would take more bytes."""
    values, places = x.sort(dim, descending=largest)
    return values.narrow(dim, 0, k).clone(), places.narrow(dim, 0, k).clone()


# Order statistics.


class _Rows:
    """Sorted rows, along some dims, of this rank's shard, as parts of the whole rows."""

    def __init__(self, shards: Shards, x: Tensor, dims: Sequence[int]) -> None:
        self.shards, self.dims = shards, dims
        self.group = BlockGroup(shards, shards.counts(x, dims))
        last = x.movedim(tuple(dims), tuple(range(-len(dims), 0))).flatten(-len(dims))
        self.rows, self.others = as_rows(last, -1)
        self.in_order, order = self.rows.detach().sort(dim=-1, stable=True)
        self.order = narrowed(order, self.rows.shape[1])

    def num_nans(self) -> Tensor:
        """Per row, the number of NaNs in the whole row."""
        if not self.rows.is_floating_point():
            return torch.zeros(len(self.rows), dtype=torch.long, device=self.rows.device)
        return self.group.gather(self.rows.isnan().sum(-1)).sum(0)

    def pick(self, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """The elements of these ranks (rows, cuts) and, for a single dim, their positions; shaped
        as the tensor, with the cuts at the position of the (first) dim."""
        before = split(self.group, self.in_order, ranks)
        at = before[self.group.mine]
        if not self.rows.shape[1]:
            places = keys = torch.zeros_like(at)
            values = self.rows.sum(-1, keepdim=True).to(self.rows.dtype).expand_as(at)
        else:
            inside = at.clamp(max=self.rows.shape[1] - 1)
            places = self.order.gather(-1, inside).long()
            keys = keys_of(self.in_order.gather(-1, inside))
            values = self.rows.gather(-1, places)
        owned = first_next(self.group, before, keys) == self.group.mine
        values = torch.where(owned, values, torch.zeros((), dtype=values.dtype))
        places = torch.where(owned, places + self.shards.starts[self.dims[0]], 0)
        return self._joined(values), self._joined(places)

    def _joined(self, own: Tensor) -> Tensor:
        """A value that one shard has; the others have zero in its place."""
        return self.shards.gather(self.shaped(own))[0].sum(0).to(own.dtype)

    def shaped(self, cuts: Tensor) -> Tensor:
        """(rows, cuts) in the shape of the tensor."""
        out = cuts.view(*self.others, cuts.shape[-1]).movedim(-1, self.dims[0])
        for dim in self.dims[1:]:
            out = out.unsqueeze(dim)
        return out


def _kthvalue(
    shards: Shards, x: Tensor, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Samples show which shard has the element of rank k; that shard sends it."""
    rows = _Rows(shards, x, shards.dims)
    values, places = rows.pick(torch.full((len(rows.rows), 1), k - 1, device=x.device))
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _median(ignores_nans: bool) -> Callable[..., Any]:
    def kernel(shards: Shards, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        dims = dim_list(dim, x.dim())
        rows = _Rows(shards, x.detach() if dim is None else x, dims)
        nans, count = rows.num_nans(), sum(rows.group.sizes)
        ranks = (count - nans - 1).clamp(min=0) // 2
        if not ignores_nans:  # the first NaN, if any
            ranks = torch.where(nans > 0, count - nans, ranks)
        values, places = rows.pick(ranks.unsqueeze(-1))
        if dim is None:
            if x.requires_grad and torch.is_grad_enabled():
                fixed = x.detach()
                attain = (fixed == values) | (fixed.isnan() & values.isnan())
                values = shards.psum(shared(shards, x, values, attain, dims))
            return values.squeeze()
        return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))

    kernel.__doc__ = "The lower of the two middle elements, found by samples."
    return kernel


def _mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The longest run of equal elements in sorted order."""
    values, places = torch.sort(x, dim=dim, stable=True)
    more, fixed = x.shape[dim] - 1, values.detach()
    at = torch.ones_like(places).cumsum(dim)
    begins = fixed.narrow(dim, 1, more) != fixed.narrow(dim, 0, more)
    starts = torch.cat([at.narrow(dim, 0, 1), torch.where(begins, at.narrow(dim, 1, more), 0)], dim)
    best = (at - starts.cummax(dim)[0]).argmax(dim, keepdim=True)
    found = values.gather(dim, best), places.gather(dim, best)
    return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))


def _has_room(call: Call) -> bool:
    """Where another dim is long enough for the axes, if there are any."""
    return not sharded_along(call, -1) or not _has_no_room(call)


def _levels(call: Call, wants_grad: Sequence[bool]) -> str:
    """Several levels make a leading dim; for their gradient rows are whole."""
    levels, mark = call.tensors[1:], "!" if True in wants_grad[1:] else "~"
    if not levels:
        return f"...>0 s{mark} -> ..."
    return f"...>0 s{mark}, q -> q ..." if levels[0].shape else f"...>0 s{mark}, -> ..."


def _quantile(ignores_nans: bool) -> Callable[..., Any]:
    def kernel(
        shards: Shards, x: Tensor, q: Tensor | float, dim: int | None = None,
        keepdim: bool = False, *, interpolation: str = "linear",
    ) -> Tensor:
        dims = dim_list(dim, x.dim())
        levels = torch.as_tensor(q, dtype=x.dtype, device=x.device)
        rows = _Rows(shards, x, dims)
        # The levels are at the position of the first of the dims: move them to the front.
        out = _quantiles(rows, levels.reshape(-1), ignores_nans, interpolation).movedim(dims[0], 0)
        out = out.unsqueeze(dims[0] + 1) if keepdim else out.squeeze(dims[1:])
        return out if levels.dim() else out[0]

    kernel.__doc__ = "Between the elements of the two nearest ranks, found by samples."
    return kernel


def _quantiles(rows: _Rows, q: Tensor, ignores_nans: bool, interpolation: str) -> Tensor:
    """As in torch: interpolated between the elements of the two nearest ranks."""
    if not bool(((q >= 0) & (q <= 1)).all()):
        raise RuntimeError("quantile() q values must be in the range [0, 1]")
    nans, count = rows.num_nans().unsqueeze(-1), sum(rows.group.sizes)
    if ignores_nans:
        ranks = (q * (count - nans - 1)).clamp(min=0)
    else:
        ranks = torch.where(nans > 0, count - 1, (q * (count - 1)).expand(len(nans), -1))
    if interpolation in ("lower", "higher", "nearest"):
        nearest = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}
        return rows.pick(nearest[interpolation](ranks).long())[0]
    below, above = ranks.long(), ranks.ceil().long()
    weights = torch.full_like(ranks, 0.5) if interpolation == "midpoint" else ranks - below
    low, high = rows.pick(torch.cat([below, above], -1))[0].chunk(2, rows.dims[0])
    return low.lerp(high, rows.shaped(weights).to(low.dtype))


_MEDIAN = ("... s~ -> ...", "... s~ -> ..., ...")

PAGE = page(
    _entry("sort", "... s~ -> ... s, ... s", default=-1, serves=_has_no_room, kernel=_sort),
    op("topk", rule("... s~ -> ... t, ... t", along="dim", default=-1, serves=_is_small),
       rule("... s! -> ... t, ... t", along="dim", default=-1, serves=_has_room),
       kernel=_topk, compose=_cut_off),
    _entry("kthvalue", "... s~ -> ..., ...", default=-1, serves=_few_samples, kernel=_kthvalue),
    op("mode", rule("... s! -> ..., ...", along="dim", default=-1, serves=_has_room),
       compose=_mode),
    _entry("median", *_MEDIAN, serves=_few_samples, kernel=_median(False)),
    _entry("nanmedian", *_MEDIAN, serves=_few_samples, kernel=_median(True)),
    _entry("quantile", _levels, serves=_few_samples, kernel=_quantile(False)),
    _entry("nanquantile", _levels, serves=_few_samples, kernel=_quantile(True)),
)
