"""What results of an op share with their operand in torch: memory, and places in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.tensor.meta import Meta
from weft.tensor.trace.capture import Op, meta_like, unwatched
from weft.tensor.trace.trees import fill, flatten, slots_of

__all__ = ["as_slice", "shares_memory"]


def shares_memory(op: Op, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the result of an op that may copy shares memory with its first operand (of `tensors`,
    by their slots)."""
    slots = [slot.index for slot in slots_of((op.args, op.kwargs))]
    metas = {slot: meta_like(tensors[slot]) for slot in slots}
    with unwatched():
        (out,) = flatten(op.overload(*fill(op.args, metas), **fill(op.kwargs, metas)))
    base = metas[slots[0]]
    return out.untyped_storage()._cdata == base.untyped_storage()._cdata


def as_slice(made: Meta, base: Meta, starts: tuple[int, ...]) -> Meta | None:
    """`made`, a slice of `base` that begins at `starts`, as one that remembers that; None where no
    sharded dim is sliced, nor was one before."""
    layout = base.layout
    cut = any(
        axes and length != now for axes, length, now in zip(layout.dims, layout.shape, made.shape))
    if layout.is_partial or not (cut or base.slice_of):
        return None
    of, first = base.slice_of or (layout, (0,) * layout.ndim)
    return made.as_slice(of, tuple([one + other for one, other in zip(first, starts)]))
