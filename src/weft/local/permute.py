"""Blocks sent from rank to rank by pairs: the only collective that is no change of layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.comm import Communicator
from weft.errors import LayoutError, message
from weft.transport import traffic

__all__ = ["Pairs", "Permute", "as_pairs", "received"]

Pairs = tuple[tuple[int, int], ...]
"""(from, to), positions in a group."""

Shapes = Sequence[tuple[int, ...]]


def as_pairs(perm: Sequence[tuple[int, int]], size: int) -> Pairs:
    """The pairs, checked.

    Raises:
        LayoutError: a position that does not exist, or occurs twice on one side.
    """
    pairs = tuple((int(source), int(target)) for source, target in perm)
    outside = [pair for pair in pairs if not all(0 <= place < size for place in pair)]
    twice = [
        pair for side in (0, 1) for pair in pairs
        if sum(other[side] == pair[side] for other in pairs) > 1
    ]
    if outside or twice:
        raise LayoutError(
            message("ppermute(perm)", f"{len(outside)} pairs name no place of 0 to {size - 1}, "
                    f"{len(set(twice))} name a place that another pair names on the same side",
                    "each place sends to one place at most and receives from one at most",
                    [*outside, *dict.fromkeys(twice)],
                    f"[(i, (i + 1) % {size}) for i in range({size})]")
        )
    return pairs


def received(pairs: Pairs, shapes: Shapes) -> list[tuple[int, ...]]:
    """The shape at each position afterwards: its source's, or its own if none sends."""
    sources = {target: source for source, target in pairs}
    return [shapes[sources.get(place, place)] for place in range(len(shapes))]


class Permute(torch.autograd.Function):
    """Its backward sends the gradients back.

    `before` and `after` are the shapes of argument and result at every position.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, comm: Communicator, pairs: Pairs, before: Shapes, after: Shapes
    ) -> Tensor:
        ctx.comm, ctx.pairs, ctx.before, ctx.after = comm, pairs, before, after
        ctx.note = traffic.note() if traffic.STATE.on else None
        me = comm.index
        targets = [target for source, target in pairs if source == me]
        sources = [source for source, target in pairs if target == me]
        send, recv = [0] * comm.size, [0] * comm.size
        for target in targets:
            send[target] = math.prod(before[me])
        for source in sources:
            recv[source] = math.prod(before[source])
        traffic.emit("blocks by pairs", tuple(map(str, comm.axes)), "AllToAll",
                     sum(recv) * x.element_size() * (sources != [me]))
        flat = x.reshape(-1).contiguous() if targets else x.new_empty(0)
        got = comm.all_to_all(flat, send, recv)
        return got.view(after[me]) if sources else x.new_zeros(after[me])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        back = tuple((target, source) for source, target in ctx.pairs)
        with traffic.resume(ctx.note, "gradient of ppermute") if ctx.note else nullcontext():
            found = Permute.apply(grad, ctx.comm, back, ctx.after, ctx.before)
        return found, None, None, None, None
