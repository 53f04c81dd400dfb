"""Where the extrema are: argmax, argmin, and max and min along a dim that is cut.

Each block's winner is gathered with its place. Of equal winners the first place counts, and a NaN
wins over everything, as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.ops.algorithm import Algorithm
from weft.ops.blocks.summaries import Blocks, finish, is_cut, nothing_of, reduced
from weft.rules import Call

__all__ = ["argmax_lookup", "max_lookup"]


def max_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`max(x, dim)` and `min(x, dim)` along a cut dim that has elements: values and places."""
    layout = layouts[0]
    if not layout.ndim:
        return None
    dim, keepdim = call.args[1] % layout.ndim, bool(call.args[2])
    if not layout.dims[dim] or not layout.shape[dim]:
        return None
    largest = call.op.startswith("aten.max")

    def function(blocks: Blocks, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[dim]:
            value, place = (torch.max if largest else torch.min)(x, dim, keepdim=True)
            place = place + blocks.layout.interval(dim, blocks.mine)[0]
        else:
            value = nothing_of(x, (dim,), x.dtype)
            place = torch.zeros_like(value, dtype=torch.long)
        return _winner(blocks, value, place, largest)

    return finish(call, layout, (dim,), keepdim, function)


def argmax_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """argmax and argmin along a cut dim, or of everything, as a place in the flattened tensor."""
    layout = layouts[0]
    given, keepdim = call.args[1], bool(call.args[2])
    dims = reduced(layout, given)
    if not is_cut(layout, dims) or not all(layout.shape[dim] for dim in dims):
        return None
    largest = call.op.startswith("aten.argmax")

    def function(blocks: Blocks, x: Tensor) -> Tensor:
        find = torch.argmax if largest else torch.argmin
        if not blocks.sizes[blocks.mine] or 0 in x.shape:
            value = nothing_of(x, dims, x.dtype)
            place = torch.zeros_like(value, dtype=torch.long)
        elif given is not None:
            place = find(x, dims[0], keepdim=True)
            value = x.gather(dims[0], place)
            place = place + _start(blocks)[dims[0]]
        else:
            flat = find(x)
            value = x.flatten()[flat].view([1] * x.dim())
            place = _global_place(flat, x.shape, blocks).view([1] * x.dim())
        return _winner(blocks, value, place, largest)[1]

    return finish(call, layout, dims, keepdim, function)


def _start(blocks: Blocks) -> list[int]:
    assert blocks.bound.here is not None
    return [start for start, _ in blocks.layout.box_at(blocks.bound.here)]


def _global_place(flat: Tensor, shape: Sequence[int], blocks: Blocks) -> Tensor:
    """A place in the flattened block as one in the flattened tensor."""
    place, stride = torch.zeros_like(flat), 1
    starts, lengths = _start(blocks), blocks.layout.shape
    for dim in reversed(range(len(shape))):
        place = place + (flat % shape[dim] + starts[dim]) * stride
        flat, stride = flat // shape[dim], stride * lengths[dim]
    return place


def _winner(
    blocks: Blocks, value: Tensor, place: Tensor, largest: bool
) -> tuple[Tensor, Tensor]:
    """The extremum of the blocks' extrema, and the first place that attains it."""
    values: Any = blocks.of_filled(blocks.gather(value)[0])
    places = blocks.of_filled(blocks.gather(place)[0])
    fixed = values.detach()
    best = (fixed.amax if largest else fixed.amin)(0)
    attains = (fixed == best) | ((fixed != fixed) & (best != best))
    first, block = torch.where(attains, places, torch.iinfo(torch.long).max).min(0)
    return values.gather(0, block.unsqueeze(0))[0], first
