"""Attention of this rank's queries to blocks of keys, tile by tile: no rank ever holds all scores.

For each row it keeps the maximum, the sum of exponentials and the weighted values over the keys so
far (Milakov, Gimelshein, Online normalizer calculation for softmax, 2018). Those of several ranks
are merged as those of several tiles are. Backward computes the scores of a tile again (Dao et al.,
FlashAttention, 2022). Half precision is computed in float32. Where there is neither mask nor
dropout, torch's kernel sees a block at once (`fused`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core import Interval
from weft.ops.attending import fused
from weft.ops.precision import wide

__all__ = ["Options", "Gradients", "Noise", "Rows"]

_TILE_SCORES = {"cpu": 1 << 17, "meta": 1 << 17}
"""How many scores a tile has, of all heads together: what is made of them stays in the cache."""

_TILE_SCORES_OF_DEVICES = 1 << 24

Noise = Callable[[Interval, Interval], Tensor]
"""(rows, columns) -> what weights of these positions are multiplied by."""


@dataclass(frozen=True, slots=True)
class Options:
    """The mask and the options of attention, as this rank sees them.

    Args:
        scale: of the scores. is_causal: whether a query sees no key of a later position.
        first_row: the position of the first query.
        mask: added to scores, or False where a score is left out; None.
        first_column: the position of the mask's first column.
        noise: of the weights, or None.
    """

    scale: float
    is_causal: bool
    first_row: int = 0
    mask: Tensor | None = None
    first_column: int = 0
    noise: Noise | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores and weights stay as they are."""
        return self.mask is None and self.noise is None

    def parts(self, num_rows: int, num_columns: int, column: int) -> Iterator[fused.Part]:
        """What the rows see of a block without a mask, the first key of which has this position."""
        return fused.parts(num_rows, num_columns, self.first_row, column, self.is_causal)

    def scores(self, q: Tensor, k: Tensor, row: int, column: int) -> Tensor:
        """Those of the queries from `row` on, of this rank, and the keys from position `column`."""
        scores = torch.matmul(q, k.mT).mul_(self.scale)
        rows, columns = scores.shape[-2:]
        mask = self.of_mask(self.mask, row, rows, column, columns)
        if mask is not None:
            if mask.dtype is torch.bool:
                scores.masked_fill_(mask.logical_not(), -math.inf)
            else:
                scores.add_(mask)
        first = self.first_row + row
        if self.is_causal and column + columns - 1 > first:
            device = scores.device
            queries = torch.arange(first, first + rows, device=device).unsqueeze(-1)
            keys = torch.arange(column, column + columns, device=device)
            scores.masked_fill_(keys > queries, -math.inf)
        return scores

    def of_mask(
        self, mask: Tensor | None, row: int, rows: int, column: int, columns: int
    ) -> Tensor | None:
        """The part of a mask, or of its gradient, that scores of a tile meet."""
        if mask is None:
            return None
        if mask.shape[-2] != 1:
            mask = mask.narrow(-2, row, rows)
        if mask.shape[-1] != 1:
            mask = mask.narrow(-1, column - self.first_column, columns)
        return mask

    def kept(self, weights: Tensor, row: int, column: int) -> Tensor:
        """The weights of a tile times their noise."""
        if self.noise is None:
            return weights
        rows, columns = weights.shape[-2:]
        first = self.first_row + row
        return weights * self.noise((first, first + rows), (column, column + columns))

    def tiles(
        self, num_rows: int, num_columns: int, lead: int, column: int, device: torch.device
    ) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of the tiles of a block that any row sees; the block's first key has
        position `column`, and `lead` counts its heads and samples."""
        if not num_rows or not num_columns or not lead:
            return
        limit = max(_TILE_SCORES.get(device.type, _TILE_SCORES_OF_DEVICES) // lead, 1)
        height = min(num_rows, max(math.isqrt(limit), 16))
        width = min(num_columns, max(limit // height, 16))
        for row in range(0, num_rows, height):
            below = min(row + height, num_rows)
            for start in range(0, num_columns, width):
                if not self.is_causal or column + start < self.first_row + below:
                    yield slice(row, below), slice(start, min(start + width, num_columns))


class Rows:
    """The state of this rank's queries after the keys so far.

    Attributes, per query: `top`, the largest score; `total`, the sum of exp(score - top); `out`,
    that of the values weighted by them.
    """

    __slots__ = ("options", "lead", "out", "q", "top", "total")

    def __init__(self, options: Options, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.options, self.q = options, q
        lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        shape, dtype = (*lead, q.shape[-2]), wide(q.dtype)
        self.lead = math.prod(lead)
        self.top = q.new_full(shape, -math.inf, dtype=dtype)
        self.total = q.new_zeros(shape, dtype=dtype)
        self.out = q.new_zeros((*shape, v.shape[-1]), dtype=dtype)

    def attend(self, k: Tensor, v: Tensor, column: int) -> None:
        """See a block of keys, the first of which has position `column`."""
        options, dtype = self.options, self.out.dtype
        num_rows, num_columns = self.q.shape[-2], k.shape[-2]
        if options.is_plain and fused.serves(self.q, k, v):
            for part in options.parts(num_rows, num_columns, column):
                out, logs = fused.attend(
                    self.q[..., part.rows, :], k[..., part.columns, :], v[..., part.columns, :],
                    part.is_causal, options.scale)
                self._see(part.rows, logs, torch.ones_like(logs), out)
            return
        for rows, columns in options.tiles(num_rows, num_columns, self.lead, column, k.device):
            place = column + columns.start
            scores = options.scores(self.q[..., rows, :].to(dtype), k[..., columns, :].to(dtype),
                                  rows.start, place)
            top = scores.amax(-1)
            scores = scores.sub_(_finite(top).unsqueeze(-1)).exp_()
            total = scores.sum(-1)
            seen = options.kept(scores, rows.start, place) @ v[..., columns, :].to(dtype)
            self._see(rows, top, total, seen)

    def _see(self, rows: slice, top: Tensor, total: Tensor, seen: Tensor) -> None:
        """Add the contribution of some keys to some rows."""
        own = self.top[..., rows]
        both = torch.maximum(own, top)
        base = _finite(both)
        decay, weight = (own - base).exp_(), (top - base).exp_()
        self.total[..., rows].mul_(decay).add_(total * weight)
        self.out[..., rows, :].mul_(decay.unsqueeze(-1)).add_(seen * weight.unsqueeze(-1))
        self.top[..., rows] = both

    def merge(
        self, largest: Callable[[Tensor], Tensor], summed: Callable[[Tensor], Tensor]
    ) -> None:
        """Add the states of other ranks; `largest` and `summed` reduce over these."""
        top = largest(self.top)
        decay = (self.top - _finite(top)).exp_().unsqueeze(-1)
        both = summed(torch.cat([self.out, self.total.unsqueeze(-1)], -1).mul_(decay))
        self.top, self.total, self.out = top, both[..., -1], both[..., :-1]

    def finish(self) -> tuple[Tensor, Tensor]:
        """The result, and the log of the sum of exp(score); of rows that see nothing zero, and
        inf, so that their weights are zero."""
        nothing = self.total == 0
        total = self.total.masked_fill(nothing, 1)
        logs = total.log().add_(_finite(self.top)).masked_fill_(nothing, math.inf)
        return self.out.div_(total.unsqueeze(-1)).to(self.q.dtype), logs


class Gradients:
    """The gradients of this rank's queries and of its part of the mask; those of blocks of keys
    and values are what `of_block` gives.

    Args:
        logs: of the sums of exp(score), as `Rows.finish` gives them. out, grad: the result and its
            gradient.
        of_mask: whether the mask has one.
    """

    __slots__ = ("options", "delta", "grad", "lead", "logs", "mask", "out", "q", "query")

    def __init__(
        self, options: Options, q: Tensor, logs: Tensor, out: Tensor, grad: Tensor, of_mask: bool
    ) -> None:
        self.options, self.q, self.logs, self.out, self.grad = options, q, logs, out, grad
        dtype = logs.dtype
        self.lead = math.prod(logs.shape[:-1])
        self.delta = (out.to(dtype) * grad.to(dtype)).sum(-1)
        self.query = torch.zeros_like(q, dtype=dtype)
        self.mask = torch.zeros_like(options.mask, dtype=dtype) if of_mask and (
            options.mask is not None) else None

    def of_block(self, k: Tensor, v: Tensor, column: int) -> tuple[Tensor, Tensor]:
        """The gradients of a block of keys and values, the first of position `column`."""
        options, dtype = self.options, self.logs.dtype
        num_rows, num_columns = self.q.shape[-2], k.shape[-2]
        if options.is_plain and fused.serves(self.q, k, v):
            return self._of_parts([*options.parts(num_rows, num_columns, column)], k, v)
        key, value = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        for rows, columns in options.tiles(num_rows, num_columns, self.lead, column, k.device):
            place = column + columns.start
            q, keys = self.q[..., rows, :].to(dtype), k[..., columns, :].to(dtype)
            grad = self.grad[..., rows, :].to(dtype)
            weights = options.scores(q, keys, rows.start, place)
            weights = weights.sub_(self.logs[..., rows].unsqueeze(-1)).exp_()
            _add(value[..., columns, :],
                 torch.matmul(options.kept(weights, rows.start, place).mT, grad))
            of_scores = torch.matmul(grad, v[..., columns, :].to(dtype).mT)
            of_scores = options.kept(of_scores, rows.start, place)
            of_scores = of_scores.sub_(self.delta[..., rows].unsqueeze(-1)).mul_(weights)
            if self.mask is not None:
                part = options.of_mask(self.mask, rows.start, q.shape[-2], place, keys.shape[-2])
                assert part is not None
                _add(part, of_scores)
            of_scores.mul_(options.scale)
            _add(self.query[..., rows, :], torch.matmul(of_scores, keys))
            _add(key[..., columns, :], torch.matmul(of_scores.mT, q))
        return key, value

    def _of_parts(
        self, parts: list[fused.Part], k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Those of a block by torch's kernel."""
        dtype = self.logs.dtype
        if len(parts) == 1 and parts[0].columns == slice(0, k.shape[-2]):
            key, value = self._of_part(parts[0], k, v)
            return key.to(dtype), value.to(dtype)
        key, value = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        for part in parts:
            more = self._of_part(part, k, v)
            key[..., part.columns, :].add_(more[0])
            value[..., part.columns, :].add_(more[1])
        return key, value

    def _of_part(self, part: fused.Part, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = part.rows, part.columns
        query, key, value = fused.gradients(
            self.grad[..., rows, :], self.q[..., rows, :], k[..., columns, :], v[..., columns, :],
            self.out[..., rows, :], self.logs[..., rows], part.is_causal, self.options.scale)
        self.query[..., rows, :].add_(query)
        return key, value


def _finite(top: Tensor) -> Tensor:
    """The largest scores; 0 of rows that have seen none."""
    return top.masked_fill(top == -math.inf, 0)


def _add(total: Tensor, more: Tensor) -> None:
    """Add to `total` what may have been broadcast from its shape."""
    total.add_(more.sum_to_size(total.shape))
