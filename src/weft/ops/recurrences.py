"""The linear recurrence h[t] = a[t] h[t-1] + b[t], elementwise, along a dim.

A dim is scanned in about sqrt(n) chunks at once, twice: first for the effect of each chunk on a
state (a product and a sum), then, from the states at the chunks' starts, for the states in between
(Blelloch, Prefix Sums and Their Applications, 1990). Between the two, the ranks of a sharded dim
exchange the effect of their shards on a state: one exchange, whatever the length. Nothing is
divided, so factors may be zero, and products may underflow.

What is differentiated is the sequence of states *before* each step, and the one after the last.
Its gradient is the same scan in the opposite direction, of the gradients of these states (Martin,
Cundy, Parallelizing Linear Recurrent Neural Nets Over Sequence Length, 2018): so are all further
derivatives, with one exchange each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableAutocast  # type: ignore[attr-defined]

from weft.ops.precision import wide
from weft.rules import OwnRule, TensorArg
from weft.transport import Shards, traffic

__all__ = ["RULE", "recurrence"]


def recurrence(
    a: Tensor, b: Tensor, dim: int, initial: Tensor | None, reverse: bool
) -> Tensor:
    """On whole tensors of one shape; `initial` has it without `dim`."""
    return _recurrence(None, a, b, dim, initial, reverse)


def _recurrence(
    shards: Shards | None, a: Tensor, b: Tensor, dim: int, initial: Tensor | None, reverse: bool
) -> Tensor:
    """Each shard's states, from the effect of the shards before it on the first state."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    dtype = dtype if initial is None else torch.promote_types(dtype, initial.dtype)
    exact = wide(dtype)
    with _DisableAutocast():
        a, b = a.to(exact), b.to(exact)
        lead = b.shape[:dim] + b.shape[dim + 1 :]
        start = b.new_zeros(lead) if initial is None else initial.to(exact)
        before, _ = _States.apply(a, b, start, dim, reverse, shards)  # type: ignore[misc]
        return torch.addcmul(b, a, before).to(dtype)


class _States(torch.autograd.Function):
    """The state before each step, of a shard; and the last state of all, on the last rank, where
    the others have zero: a partial value."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, a: Tensor, b: Tensor, start: Tensor, dim: int, reverse: bool,
        shards: Shards | None,
    ) -> tuple[Tensor, Tensor]:
        with _DisableAutocast():
            chunks = _Chunks(a, b, dim, reverse)
            made = chunks.totals()
            end = torch.zeros_like(start)
            if shards is None:
                end = torch.addcmul(made[1], made[0], start)
            else:
                start, end = _carried(shards, made, start, end, reverse)
            before = chunks.before(start)
        ctx.rest = dim, reverse, shards
        ctx.note = traffic.note() if traffic.STATE.on else None
        ctx.save_for_backward(a, before)
        return before, end

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_end: Tensor) -> Any:  # type: ignore[override]
        a, before = ctx.saved_tensors
        dim, reverse, shards = ctx.rest
        with traffic.resume(ctx.note, "gradient of a recurrence over a sharded dim"):
            of_b, of_start = _States.apply(  # type: ignore[misc]
                a.conj(), grad, of_end, dim, not reverse, shards)
        of_a = of_b * before.conj() if ctx.needs_input_grad[0] else None
        return of_a, of_b, of_start, None, None, None


def _carried(
    shards: Shards, made: Tensor, start: Tensor, end: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The state at the start of this rank's shard, and the last one of all on the last rank."""
    every = shards.gather(made)[0]
    order = range(shards.num - 1, -1, -1) if reverse else range(shards.num)
    state = start
    for shard in order:
        if shard == shards.index:
            start = state
        state = torch.addcmul(every[shard, 1], every[shard, 0], state)
    return start, state if shards.index == order[-1] else end


class _Chunks:
    """A scan of a shard in chunks of one length, of which the last to be scanned may be shorter.

    Step by step, all chunks that have the step advance together.
    """

    def __init__(self, a: Tensor, b: Tensor, dim: int, reverse: bool) -> None:
        self.b, self.dim, self.reverse = b, dim, reverse
        self.of_a, self.of_b = a.movedim(dim, 0), b.movedim(dim, 0)
        self.length = len(self.of_b)
        self.size = max(math.isqrt(self.length), 1)
        self.num = -(-self.length // self.size)
        self.products = self.sums = b

    def steps(self) -> Iterator[tuple[slice, slice]]:
        """Per step: which elements it reads, and which chunks they belong to."""
        for step in range(min(self.size, self.length)):
            if not self.reverse:
                yield slice(step, None, self.size), slice(-(-(self.length - step) // self.size))
                continue
            last = self.length - 1 - step
            yield slice(last % self.size, last + 1, self.size), slice(
                self.num - 1 - last // self.size, None)

    def totals(self) -> Tensor:
        """The effect of the shard on a state: the factor and the summand."""
        shape = (self.num, *self.of_b.shape[1:])
        self.products, self.sums = self.b.new_ones(shape), self.b.new_zeros(shape)
        for places, chunks in self.steps():
            a = self.of_a[places]
            self.products[chunks] *= a
            self.sums[chunks] = torch.addcmul(self.of_b[places], a, self.sums[chunks])
        total = self.b.new_zeros((2, *shape[1:]))
        total[0] = 1
        for chunk in self.order():
            total[1] = torch.addcmul(self.sums[chunk], self.products[chunk], total[1])
            total[0] *= self.products[chunk]
        return total

    def order(self) -> range:
        """The chunks, as they are scanned."""
        return range(self.num - 1, -1, -1) if self.reverse else range(self.num)

    def before(self, start: Tensor) -> Tensor:
        """The state before each step, from the one before the first."""
        states = torch.empty_like(self.sums)
        for chunk in self.order():
            states[chunk] = start
            start = torch.addcmul(self.sums[chunk], self.products[chunk], start)
        out = torch.empty_like(self.b)
        of_out = out.movedim(self.dim, 0)
        for places, chunks in self.steps():
            state = states[chunks]
            of_out[places] = state
            states[chunks] = torch.addcmul(self.of_b[places], self.of_a[places], state)
        return out


def _string(
    a: TensorArg, b: TensorArg, dim: int, initial: TensorArg | None, reverse: bool
) -> str:
    """Of three dims, along the middle one: "d0 t~ d2, d0 t~ d2, d0 d2 -> d0 t d2"."""
    names = [f"d{at}" for at in range(len(b.shape))]
    given = " ".join(["t~" if at == dim else name for at, name in enumerate(names)])
    first = " ".join([name for at, name in enumerate(names) if at != dim])
    made = given.replace("t~", "t")
    return f"{given}, {given}{'' if initial is None else f', {first}'} -> {made}"


RULE = OwnRule("linear_scan", _string, kernel=_recurrence)
