"""Attention whose queries stay where they are, as a node of autograd's graph.

Forward uses this rank's keys, then those that others send round by round. It merges the results of
ranks that hold other keys for the same queries. It saves this rank's shards, the result and a
number for each query. Backward fetches the keys again and sends their gradients back. For second
derivatives, plain operations compute the same from gathered keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableAutocast  # type: ignore[attr-defined]

from weft.comm import Communicator
from weft.ops.attending.blocks import Blocks, Round
from weft.ops.attending.stretches import Order, Stretch, positions, stretches
from weft.ops.attending.tiles import Gradients, Options, Rows
from weft.ops.precision import wide
from weft.transport import collective, traffic

__all__ = ["Keys", "attend", "masked_weights"]

_gradients: Any = torch.autograd.grad
BUFFER_NBYTES = 1 << 18
"""Bytes of keys and values that a round may bring to a rank, or a quarter of a block if more."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys and values of one call: their layouts, and how blocks of others arrive.

    Args:
        queries, keys: those of this rank.
        blocks: the ranks that hold other queries, and other keys; None where there are none.
        others: the ranks that hold other keys for the same queries; None where there are none.
        gather: (operand, its number) -> keys (1), values (2) or the mask (3), with the keys of all
            ranks.
        order: of all positions in the sequence; where there are several stretches of queries there
            is no mask and no dropout.
    """

    queries: tuple[Stretch, ...]
    keys: tuple[Stretch, ...]
    blocks: Blocks | None
    others: Communicator | None
    gather: Callable[[Tensor, int], Tensor]
    order: Order = None

    @classmethod
    def alone(cls, num_queries: int, num_keys: int, order: Order) -> Keys:
        """One rank has all."""
        queries, keys = (stretches((0, num), order) for num in (num_queries, num_keys))
        return cls(queries, keys, None, None, lambda x, operand: x, order)

    def rounds(self, k: Tensor, v: Tensor) -> list[Round]:
        """The rounds in which blocks come."""
        if self.blocks is None:
            return []
        of_row = sum([
            one.shape[:-2].numel() * one.shape[-1] * one.element_size() for one in (k, v)
        ])
        return self.blocks.rounds(BUFFER_NBYTES // max(of_row, 1))

    def reduced(self, x: Tensor, kind: str) -> Tensor:
        """The reduction over the ranks that hold other keys."""
        assert self.others is not None
        return collective(x, self.others, kind)


def attend(keys: Keys, options: Options, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of this rank's queries; the mask is in `options`."""
    return _Attention.apply(keys, options, q, k, v, options.mask)  # type: ignore[return-value]


def _plain(keys: Keys, options: Options, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same from the keys of all ranks, differentiable to any order."""
    dtype = wide(q.dtype)
    k, v = keys.gather(k, 1), keys.gather(v, 2)
    scores = torch.matmul(q.to(dtype), k.to(dtype).mT) * options.scale
    if options.is_causal:
        queries = positions(keys.queries, q.device).unsqueeze(-1)
        columns = positions(stretches((0, scores.shape[-1]), keys.order), q.device)
        scores = scores.masked_fill(columns > queries, -torch.inf)
    mask = None if options.mask is None else keys.gather(options.mask, 3)
    weights = masked_weights(scores, mask)
    return torch.matmul(options.kept(weights, 0, 0), v.to(dtype)).to(q.dtype)


def masked_weights(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax of scores that a mask hides or changes; zero for rows that see nothing."""
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


class _Attention(torch.autograd.Function):
    """Saves shards, the result and the logs of the sums; never scores."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, keys: Keys, options: Options, q: Tensor, k: Tensor, v: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        with _DisableAutocast():
            parts = [Rows(replace(options, first_row=one.position), one.of(q), k, v)
                     for one in keys.queries]
            for position, of_k, of_v in _seen(keys, k, v):
                for rows in parts:
                    rows.attend(of_k, of_v, position)
            if keys.others is not None:
                for rows in parts:
                    rows.merge(lambda x: keys.reduced(x, "max"), lambda x: keys.reduced(x, "sum"))
            found = [rows.finish() for rows in parts]
            out = _joined([one for one, _ in found], -2)
            logs = _joined([one for _, one in found], -1)
        ctx.keys, ctx.options = keys, replace(options, mask=None)
        ctx.note = traffic.note() if traffic.STATE.on else None
        ctx.save_for_backward(q, k, v, mask, out, logs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        q, k, v, mask, out, logs = ctx.saved_tensors
        run = _again if torch.is_grad_enabled() else _backward
        options = replace(ctx.options, mask=mask)
        with traffic.resume(ctx.note, "gradient of attention over a sharded sequence"):
            found = run(ctx, options, grad, q, k, v, out, logs)
        return None, None, *found


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _seen(keys: Keys, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Position, keys and values of each stretch of this rank, and of each piece that comes from
    others."""
    for one in keys.keys:
        yield one.position, one.of(k), one.of(v)
    for round_ in keys.rounds(k, v):
        assert keys.blocks is not None
        for piece, (of_k, of_v) in keys.blocks.fetch((k, v), round_):
            yield piece.position, of_k, of_v


def _backward(
    ctx: Any, options: Options, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    logs: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of this rank's queries, keys, values and part of the mask."""
    keys = ctx.keys
    with _DisableAutocast():
        if keys.others is not None:  # each rank has a term of the gradient of what all know
            grad = keys.reduced(grad.contiguous(), "sum")
        parts = [
            Gradients(replace(options, first_row=one.position), one.of(q),
                      logs.narrow(-1, one.row, one.num), one.of(out), one.of(grad),
                      ctx.needs_input_grad[5])
            for one in keys.queries
        ]
        totals = [_joined(list(each), -2) for each in zip(*[
            _of_block(parts, one.of(k), one.of(v), one.position) for one in keys.keys
        ])]
        for round_ in keys.rounds(k, v):
            keys.blocks.give_back([
                _of_block(parts, of_k, of_v, piece.position)
                for piece, (of_k, of_v) in keys.blocks.fetch((k, v), round_)
            ], round_, totals, k.dtype)
    key, value = totals
    query, of_mask = _joined([rows.query for rows in parts], -2), parts[0].mask
    if of_mask is not None and options.mask is not None:
        of_mask = of_mask.to(options.mask.dtype)
    return query.to(q.dtype), key.to(k.dtype), value.to(v.dtype), of_mask


def _of_block(
    parts: list[Gradients], k: Tensor, v: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """The gradients of a block of keys and values, of all stretches of queries."""
    key, value = parts[0].of_block(k, v, position)
    for rows in parts[1:]:
        more = rows.of_block(k, v, position)
        key, value = key.add_(more[0]), value.add_(more[1])
    return key, value


def _again(
    ctx: Any, options: Options, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    logs: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients with a graph of their own."""
    needs = ctx.needs_input_grad[2:]
    given = [one for one, need in zip((q, k, v, options.mask), needs) if need]
    with _DisableAutocast():
        result = _plain(ctx.keys, options, q, k, v)
    found = iter(_gradients(result, given, grad, create_graph=True))
    return tuple([next(found) if need else None for need in needs])
