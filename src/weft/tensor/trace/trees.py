"""Nested arguments: the tensors in them, and putting others in their places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.capture import Slot

__all__ = ["fill", "flatten", "leaves", "local_of", "substitute"]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local if type(tensor) is ShardTensor else tensor


def flatten(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested arguments, in order."""
    return leaves(tree, torch.Tensor)


def leaves(tree: Any, kind: type) -> list[Any]:
    """What is of this kind in nested arguments, in order."""
    found: list[Any] = []
    _collect(tree, kind, found)
    return found


def _collect(tree: Any, kind: type, found: list[Any]) -> None:
    if isinstance(tree, kind):
        found.append(tree)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _collect(item, kind, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, kind, found)
    elif isinstance(tree, slice):
        _collect((tree.start, tree.stop, tree.step), kind, found)


def substitute(tree: Any, feed: Iterator[torch.Tensor]) -> Any:
    """`tree` with its tensors replaced in order by those of `feed`."""
    if isinstance(tree, torch.Tensor):
        return next(feed)
    kind = type(tree)
    if kind is list or kind is tuple:
        return kind([substitute(item, feed) for item in tree])
    if kind is dict:
        return {name: substitute(item, feed) for name, item in tree.items()}
    if kind is slice:
        return slice(*(substitute(part, feed) for part in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, (list, tuple)) and kind is not torch.Size:
        return [substitute(item, feed) for item in tree]
    return tree


def fill(tree: Any, values: Any) -> Any:
    """`tree` with each Slot replaced by `values[slot.index]`."""
    kind = type(tree)
    if kind is Slot:
        return values[tree.index]
    if kind is list or kind is tuple:
        return kind([fill(item, values) for item in tree])
    if kind is dict:
        return {name: fill(item, values) for name, item in tree.items()}
    if isinstance(tree, tuple) and kind is not torch.Size:
        items = [fill(item, values) for item in tree]
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return tree
