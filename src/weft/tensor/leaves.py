"""Leaves that users hold only through their ShardTensors, with side data.

The data are kept beside the leaf, because users pickle and copy leaves. Of a parameter that is
gathered while its module runs, the leaf is the shard: that has the gradient and the hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

__all__ = [
    "LEAVES", "Leaf", "before", "on_shard", "replace_leaf", "take_hooks", "track_leaf", "uses_of",
]


class Leaf:
    """Side data of a leaf: its uses, the backward that has its whole gradient, and the former leaf
    of its tensor, from graphs made before a change of layout."""

    __slots__ = ("before", "complete_in", "owner", "uses")

    def __init__(self) -> None:
        self.uses: list[weakref.ref[Any]] = []
        self.complete_in: Any = None
        self.before: TensorWeakRef | None = None
        self.owner: Any = None
        """The leaf that it is a copy of, its dtype of reductions, and what gives the transition
        that takes that leaf where a transition takes this one."""


LEAVES: Any = WeakTensorKeyDictionary()


def uses_of(local: Tensor) -> list[Any]:
    """The stand-ins of this leaf in live graphs (`leaf_gradients.LeafUse`)."""
    leaf = LEAVES.get(local)
    found = [] if leaf is None else [ref() for ref in leaf.uses]
    return [use for use in found if use is not None and use.seen is not None]


def track_leaf(local: Tensor) -> Tensor:
    """Register a leaf that users hold only through its ShardTensor."""
    if local.requires_grad and local.is_leaf and local not in LEAVES:
        LEAVES[local] = Leaf()
    return local


def replace_leaf(old: Tensor, new: Tensor) -> None:
    """Replace a tensor's leaf; the old one still represents the tensor in existing graphs."""
    LEAVES[new].before = TensorWeakRef(old)


def take_hooks(old: Any, new: Any) -> None:
    """Give the hooks of a leaf to the one that takes its place; their handles still remove them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(new, name, getattr(old, name))
        setattr(old, name, None)


def before(local: Tensor) -> list[Tensor]:
    """The former leaf of this leaf's tensor, if live graphs hold it."""
    found = []
    leaf = LEAVES.get(local)
    while leaf is not None and leaf.before is not None and (old := leaf.before()) is not None:
        found.append(old)
        leaf = LEAVES.get(old)
    return found


def on_shard(tensor: Any, do: Callable[..., Any], *args: Any) -> Any:
    """`do(tensor, *args)`, while the gathered `tensor` is its shard."""
    held, shown = tensor._gathered, (tensor._local, tensor._meta, tensor._memo)
    tensor._local, tensor._meta, tensor._memo = held.local, held.meta, None
    tensor._gathered = None
    try:
        return do(tensor, *args)
    finally:
        tensor._local, tensor._meta, tensor._memo = shown
        tensor._gathered = held
