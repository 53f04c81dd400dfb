"""Leaves that no user holds but through their ShardTensors, and what is known of them.

Nothing is written on a leaf itself, which users pickle and copy.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

__all__ = ["LEAVES", "Leaf", "before", "replace_leaf", "track_leaf"]


class Leaf:
    """What is known of a leaf: its uses, the backward that has its whole gradient, and the leaf
    that its tensor was in graphs made before it was laid anew."""

    __slots__ = ("before", "complete_in", "owner", "uses")

    def __init__(self) -> None:
        self.uses: list[weakref.ref[Any]] = []
        self.complete_in: Any = None
        self.before: TensorWeakRef | None = None
        self.owner: Any = None
        """The leaf that it is a copy of, its dtype of reductions, and what gives the transition
        that takes that leaf where a transition takes this one."""

    def in_graphs(self) -> list[Any]:
        """What stands for it in the graphs that are alive (`leaf_gradients.LeafUse`)."""
        found = [ref() for ref in self.uses]
        return [use for use in found if use is not None and use.seen is not None]


LEAVES: Any = WeakTensorKeyDictionary()


def track_leaf(local: Tensor) -> Tensor:
    """Say that no user holds this leaf but through its ShardTensor."""
    if local.requires_grad and local.is_leaf and local not in LEAVES:
        LEAVES[local] = Leaf()
    return local


def replace_leaf(old: Tensor, new: Tensor) -> None:
    """The new leaf stands for a tensor that the old one stands for in the graphs that are there."""
    LEAVES[new].before = TensorWeakRef(old)


def before(local: Tensor) -> list[Tensor]:
    """What stood for this leaf's tensor, as far as graphs that are alive hold it."""
    found = []
    leaf = LEAVES.get(local)
    while leaf is not None and leaf.before is not None and (old := leaf.before()) is not None:
        found.append(old)
        leaf = LEAVES.get(old)
    return found
