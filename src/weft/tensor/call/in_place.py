"""Targets of in-place ops: they must share memory with the tensor that they represent, in a dtype
that can hold the result and a layout that can hold its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.core import Layout
from weft.errors import UnsupportedOpError
from weft.tensor.meta import Meta, expanded_dims, is_dense
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.capture import Op, unwatched
from weft.tensor.trace.trees import fill
from weft.tensor.views.inverse import OVERLAP
from weft.transport.nodes import counting, with_gradient

__all__ = ["Reads", "check_cast", "check_gradient", "check_overlap", "check_writable", "reads_of"]


def check_writable(name: str, target: torch.Tensor) -> None:
    """Raise UnsupportedOpError if a write would not reach the target's base: a view op that had to
    communicate made it."""
    if type(target) is ShardTensor and target._meta.alias is not None:
        raise UnsupportedOpError(
            name, f"the tensor {target.sharding} came from a view op "
            f"({target._meta.alias}) that had to communicate",
            "a write through a view reaches its base only where they share memory",
            [str(target.sharding)], "write to the base, or clone() the view first")


def check_gradient(name: str, layout: Layout) -> None:
    """Raise UnsupportedOpError for a write of values that require a gradient to a layout that has
    none: partial by max or min."""
    kinds = sorted({
        kind for kind, size in zip(layout.partial, layout.mesh.axis_sizes)
        if kind in ("max", "min") and size > 1
    })
    if kinds:
        raise UnsupportedOpError(
            name, f"it writes values that require a gradient to {layout}",
            "P(max) and P(min) carry no gradient", [f"partial {kind}" for kind in kinds],
            "x = x.redistribute(placements=P()) before, or value.detach()")


def check_overlap(op: Op, metas: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Raise torch's error of a write to elements that share memory: on a rank that has none its
    kernel would not, nor does another kernel that stands for it. Which kernels do is known from
    these themselves, on a few zeros."""
    if type(target) is not ShardTensor or not expanded_dims(target):
        return
    zeros = [_few_like(one) for one in metas]
    with torch.no_grad(), unwatched():
        try:
            op.overload(*fill(op.args, zeros), **fill(op.kwargs, zeros))
        except RuntimeError as error:
            if str(error) == OVERLAP:
                raise


def _few_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of two places in each longer dim, which share memory where the tensor's do."""
    few = [min(length, 2) for length in tensor.shape]
    shared = expanded_dims(tensor)
    own = [1 if dim in shared else length for dim, length in enumerate(few)]
    return torch.zeros(own, dtype=tensor.dtype).expand(few)


class Reads:
    """Operands that may share the memory of the target, which are read before it is written.

    Args:
        target, mine: the target's slot and meta.
        others: the slots and metas of the operands, and whether torch looks for overlaps.
    """

    __slots__ = ("mine", "others", "target")

    def __init__(self, target: int, mine: Meta, others: Sequence[tuple[int, Meta, bool]]) -> None:
        self.target, self.mine, self.others = target, mine, tuple(others)

    def apart(self, opened: Any, places: Sequence[int] | None = None) -> Any:
        """The local tensors, with copies of what shares memory with the target. `places` tells
        where a slot's tensor stands, if not at its number."""
        into = opened[self.target if places is None else places[self.target]]
        memory = into.untyped_storage()._cdata
        for slot, meta, is_checked in self.others:
            at = slot if places is None else places[slot]
            one = opened[at]
            if one is not into and one.untyped_storage()._cdata == memory:
                if is_checked and _is_partly(into, self.mine, one, meta):
                    raise RuntimeError(SHARED)
                opened = [*opened]
                opened[at] = with_gradient(one, _copy, lambda grad: grad)
        return opened


def _copy(local: torch.Tensor) -> torch.Tensor:
    """A copy that counts as written to with the tensor: where autograd saves it, the backward
    raises as it does in torch, and for an operand that moved."""
    return counting(local.clone(), local)


def reads_of(
    slots: Sequence[int], target: int, tensors: Sequence[torch.Tensor], moves: Sequence[Any]
) -> Reads | None:
    """Which operands to read first; None if the kernel does what torch does on all ranks: where all
    are dense. Else a shard of one row may be dense where the whole is not, and torch, which looks
    for overlaps of dense tensors, refuses it. One without elements overlaps with nothing."""
    metas = {at: one._meta for at in slots if type(one := tensors[at]) is ShardTensor}
    mine = metas.pop(target, None)
    if mine is None or all(
        is_dense(one) and not one.layout.has_empty_shards for one in (mine, *metas.values())
    ):
        return None
    return Reads(target, mine, [
        (at, meta, moves[at] is None and is_dense(mine) and is_dense(meta))
        for at, meta in metas.items()
    ]) if metas else None


def _is_partly(one: torch.Tensor, meta: Meta, other: torch.Tensor, its: Meta) -> bool:
    """Whether two dense tensors in one memory have some elements in common, but not all. All ranks
    see the same: slices of a sharded dim know their places, others have them in all shards."""
    if meta.slice_of and its.slice_of:
        boxes = [list(zip(of.slice_of[1], of.shape)) for of in (meta, its) if of.slice_of]
    else:
        boxes = [[(local.storage_offset(), 1 + sum([
            (max(length, 1) - 1) * step for length, step in zip(local.shape, local.stride())
        ]))] for local in (one, other)]
    return boxes[0] != boxes[1] and all(
        start < its_start + its_length and its_start < start + length
        for (start, length), (its_start, its_length) in zip(*boxes)
    )


def check_cast(
    op: Op, local: Callable[..., Any], metas: Sequence[torch.Tensor], wanted: torch.dtype
) -> None:
    """Raise torch's error if the dtype of the result of `local` cannot be cast to that of the
    target."""
    with torch.no_grad(), unwatched():
        found = local(*fill(op.args, metas), **fill(op.kwargs, metas))
    if not torch.can_cast(found.dtype, wanted):
        raise RuntimeError(f"result type {_words(found.dtype)} can't be cast to the desired "
                           f"output type {_words(wanted)}")


def _words(dtype: torch.dtype) -> str:
    """As torch's messages name a dtype: `Float`."""
    return torch.empty(0, dtype=dtype).type().split(".")[-1].removesuffix("Tensor")


SHARED = (  # torch's own words
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a "
    "single memory location. Please clone() the tensor before performing the operation."
)
