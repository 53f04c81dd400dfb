"""Boxes of a local tensor: as slices, as ranges of memory, packed into one buffer and back.

A box that is contiguous in memory is never copied before sending, and data that arrives in its
final place is never copied either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.core.layout import Box
from weft.planner.geometry import volume

__all__ = [
    "Move", "flat", "joined", "outside", "pack", "part", "shape_of", "slices", "stretch", "unpack",
    "within",
]

Move = Callable[[Tensor], Tensor]


def shape_of(box: Box) -> tuple[int, ...]:
    """The lengths of a box."""
    return tuple(stop - start for start, stop in box)


def slices(box: Box) -> tuple[slice, ...]:
    """A box as slices of the whole tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """A box as slices of the tensor that holds `outer`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer))


def part(box: Box, outer: Box) -> Move:
    """The view of a box in the tensor that holds `outer`."""
    place = within(box, outer)
    cut = [(dim, at.start, at.stop - at.start) for dim, at in enumerate(place)
           if box[dim] != outer[dim]]
    match cut:
        case []:
            return lambda x: x
        case [only]:
            return lambda x: x.narrow(*only)  # a third of the time of an index
    return lambda x: x[place]


def outside(wanted: Box, inside: Box) -> tuple[Box, ...]:
    """The boxes, apart, that `wanted` has around `inside`."""
    if not volume(inside):
        return (wanted,) if volume(wanted) else ()
    found = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(wanted, inside)):
        for interval in ((start, first), (last, stop)):
            if interval[0] < interval[1]:
                found.append((*inside[:dim], interval, *wanted[dim + 1 :]))
    return tuple(found)


def stretch(boxes: Sequence[Box], whole: Box) -> tuple[int, int] | None:
    """The range of memory in which the boxes lie one after the other, in a tensor that holds
    `whole`.

    None if they do not: a box has gaps, or does not begin where the previous one ends.
    """
    shape = shape_of(whole)
    start = stop = -1
    for box in boxes:
        place = within(box, whole)
        begin, numel, gap = 0, 1, False
        for at, length in zip(place, shape):
            begin = begin * length + at.start
            mine = at.stop - at.start
            # After the first dim that is longer than 1, every dim must be whole.
            gap = gap or (numel > 1 and mine != length)
            numel *= mine
        if gap or stop not in (-1, begin):
            return None
        start, stop = (begin if start < 0 else start), begin + numel
    return (0, 0) if start < 0 else (start, stop)


def flat(x: Tensor) -> Tensor:
    """The elements in order, in one dim."""
    return x.contiguous().view(-1)


def pack(boxes: Sequence[Box], held: Box) -> Move:
    """One flat buffer with the boxes of the local tensor, in order."""
    if not boxes:
        return lambda x: x.new_empty(0)
    where = stretch(boxes, held)
    if where == (0, volume(held)):
        return flat
    parts = [part(box, held) for box in boxes]
    shapes = [shape_of(box) for box in boxes]
    if len({shape[1:] for shape in shapes}) == 1 and shapes[0]:
        # Stacked in dim 0 they are contiguous: each element is copied once.
        def together(x: Tensor) -> Tensor:
            return torch.cat([cut(x) for cut in parts]).reshape(-1)
    else:
        sizes = [volume(box) for box in boxes]

        def together(x: Tensor) -> Tensor:
            out = x.new_empty(sum(sizes))
            for place, shape, cut in zip(out.split(sizes), shapes, parts):
                place.view(shape).copy_(cut(x))
            return out

    if where is None:
        if len(parts) == 1:
            return lambda x: parts[0](x).contiguous().view(-1)
        return together
    start, stop = where
    return lambda x: x.view(-1)[start:stop] if x.is_contiguous() else together(x)


def unpack(
    boxes: Sequence[Box], wanted: Box, own: Box | None
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The local tensor, from what arrived (the boxes, one after the other) and what stayed."""
    shape = shape_of(wanted)
    if own is None and stretch(boxes, wanted) == (0, volume(wanted)):
        return lambda got, kept: got.view(shape)
    sizes = [volume(box) for box in boxes]
    shapes = [shape_of(box) for box in boxes]
    join = joined([*boxes, own] if own else boxes, wanted)

    def run(got: Tensor, kept: Tensor | None) -> Tensor:
        found = [piece.view(size) for piece, size in zip(got.split(sizes), shapes)]
        return join(found if kept is None else [*found, kept], got)

    return run


def joined(
    boxes: Sequence[Box], wanted: Box, others: Sequence[Move] = (), fill: float = 0.0
) -> Callable[[Sequence[Tensor], Tensor], Tensor]:
    """What makes one tensor of pieces with these boxes, `like` another; its `others` are filled."""
    shape = shape_of(wanted)
    places = [within(box, wanted) for box in boxes]
    varying = [dim for dim in range(len(shape)) if len({place[dim].start for place in places}) > 1]
    if len(varying) == 1 and not others:
        (dim,) = varying
        order = sorted(range(len(places)), key=lambda at: places[at][dim].start)
        return lambda pieces, like: torch.cat([pieces[at] for at in order], dim)
    parts = [part(box, wanted) for box in boxes]

    def run(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
        out = like.new_empty(shape)
        for cut in others:
            cut(out).fill_(_as_value(fill, out))
        for cut, piece in zip(parts, pieces):
            cut(out).copy_(piece)
        return out

    return run


def _as_value(fill: float, like: Tensor) -> float:
    """Infinite values are the extremes of integers."""
    if math.isinf(fill) and not like.is_floating_point():
        return torch.iinfo(like.dtype).min if fill < 0 else torch.iinfo(like.dtype).max
    return fill
