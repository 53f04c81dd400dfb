"""A redistribution as one writes it by hand, on plain tensors.

An exchange packs, calls one `all_to_all_single`, and unpacks. Which pieces go where is worked out
beforehand, from the layouts' boxes and plain arithmetic; what lies in memory as it has to travel,
or arrives as it has to lie, is not copied. A replica is read from a rank that holds it already, so
that no byte moves that need not. Where torch has a collective for the row, that one too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core import Layout

__all__ = ["ByHand", "Exchange", "gather_even", "hand_written", "scatter_even"]

Box = tuple[tuple[int, int], ...]
Way = Callable[[Tensor], Tensor]

gather_even: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_even: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By their newer names, where torch has them."""


def hand_written(src: Layout, dst: Layout, rank: int) -> dict[str, tuple[Way, Way]]:
    """What one writes for a pair: name -> the way there and the way of the gradient."""
    if not src.is_partial:
        found: dict[str, tuple[Way, Way]] = {
            "all-to-all": (Exchange(src, dst, rank), Exchange(dst, src, rank))
        }
        if not any(dst.dims) and dst.shape[0] % dst.mesh.size() == 0 and src.dims[0]:
            found["all-gather"] = _gathered(dst.shape), Exchange(dst, src, rank)
        return found
    if not any(dst.dims):
        return {"all-reduce": (_all_reduced, lambda grad: grad)}
    even = dst.shape[0] % dst.mesh.size() == 0
    whole = dst.gathered(range(dst.ndim))
    back: Way = _gathered(dst.shape) if even else Exchange(dst, whole, rank)
    return {"reduce-scatter": (_reduce_scattered(dst, rank), back)}


def _gathered(shape: tuple[int, ...]) -> Way:
    def run(x: Tensor) -> Tensor:
        out = x.new_empty(shape)
        gather_even(out, x)
        return out

    return run


def _all_reduced(x: Tensor) -> Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


def _reduce_scattered(dst: Layout, rank: int) -> Way:
    rows = [dst.local_shape(each)[0] for each in range(dst.mesh.size())]
    shape, even = dst.local_shape(rank), len(set(rows)) == 1

    def run(x: Tensor) -> Tensor:
        out = x.new_empty(shape)
        if even:
            scatter_even(out, x)
        else:
            dist.reduce_scatter(out, list(x.split(rows)))
        return out

    return run


class Exchange:
    """One redistribution without partial axes, of matrices, for this rank of the default group."""

    def __init__(self, src: Layout, dst: Layout, rank: int) -> None:
        size, pieces = src.mesh.size(), _pieces(src, dst)
        held, wanted = src.box(rank), dst.box(rank)
        sent = [pieces.get((rank, peer)) for peer in range(size)]
        got = [pieces.get((peer, rank)) for peer in range(size)]
        self.send, self.recv = list(map(_volume, sent)), list(map(_volume, got))
        self.places = [_slices(box, held) for box in sent if box]
        self.targets = [_slices(box, wanted) for box in got if box]
        self.shape = tuple(b - a for a, b in wanted)
        self.lies = _follow_each_other([box for box in sent if box], held)
        self.fits = _follow_each_other([box for box in got if box], wanted)
        self.is_local = all(holder == taker for holder, taker in pieces)

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_local:
            return x[self.places[0]].contiguous() if self.places else x.new_empty(self.shape)
        out = x.new_empty(sum(self.recv))
        dist.all_to_all_single(out, self._packed(x), self.recv, self.send)
        return out.view(self.shape) if self.fits else self._placed(out)

    def _packed(self, x: Tensor) -> Tensor:
        if self.lies:
            return x.view(-1)
        packed = x.new_empty(sum(self.send))
        for place, part in zip(self.places, packed.split([size for size in self.send if size])):
            piece = x[place]
            part.view(piece.shape).copy_(piece)
        return packed

    def _placed(self, out: Tensor) -> Tensor:
        full = out.new_empty(self.shape)
        for target, part in zip(self.targets, out.split([size for size in self.recv if size])):
            piece = full[target]
            piece.copy_(part.view(piece.shape))
        return full


def _pieces(src: Layout, dst: Layout) -> dict[tuple[int, int], Box]:
    """(holder, taker) -> what the taker gets from the holder, over all ranks of the mesh."""
    size = src.mesh.size()
    holders: dict[Box, list[int]] = {}
    for rank in range(size):
        holders.setdefault(tuple(src.box(rank)), []).append(rank)
    out: dict[tuple[int, int], Box] = {}
    for taker in range(size):
        for box, ranks in holders.items():
            shared = _shared(box, dst.box(taker))
            if shared is not None:
                out[taker if taker in ranks else ranks[taker % len(ranks)], taker] = shared
    return out


def _shared(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> Box | None:
    out = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
    return None if any(a >= b for a, b in out) else out


def _slices(box: Box, outer: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer))


def _follow_each_other(boxes: Sequence[Box], outer: Sequence[tuple[int, int]]) -> bool:
    """Whether whole rows, one box after the other, make up the outer box."""
    rows, columns = outer
    ends = [rows[0], *(box[0][1] for box in boxes)]
    return ends[-1] == rows[1] and all(
        box == ((start, stop), columns) for box, start, stop in zip(boxes, ends, ends[1:])
    )


def _volume(box: Box | None) -> int:
    total = 1
    for start, stop in box or ((0, 0),):
        total *= stop - start
    return total


class ByHand(torch.autograd.Function):
    """A way there whose gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way) -> Tensor:  # type: ignore[override]
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.back(grad), None, None
