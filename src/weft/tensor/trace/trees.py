"""Nested arguments: their leaves, and copies with other leaves.

They nest by lists, tuples, named tuples, dicts and slices, and by subclasses of these; all else is
a leaf. The same walk serves for all kinds of leaves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weft.tensor.shard_tensor import ShardTensor

__all__ = [
    "Slot", "fill", "flatten", "leaves", "local_of", "map_tensors", "replaced", "slots_of",
    "substitute",
]

_ATOMS = frozenset({
    bool, complex, float, int, str, type(None), torch.device, torch.dtype, torch.layout,
    torch.memory_format,
})
"""What most leaves are that nobody looks for; nothing is in them."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the tensor number `index` of a trace."""

    index: int


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local if type(tensor) is ShardTensor else tensor


def leaves(tree: Any, kind: type) -> list[Any]:
    """The leaves of this kind in nested arguments, in order."""
    found: list[Any] = []
    _collect(tree, kind, found)
    return found


def flatten(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested arguments, in order."""
    found: list[torch.Tensor] = []
    _collect(tree, torch.Tensor, found)
    return found


def slots_of(tree: Any) -> list[Slot]:
    """The Slots of nested arguments, in order."""
    found: list[Slot] = []
    _collect(tree, Slot, found)
    return found


def _collect(tree: Any, kind: type, found: list[Any]) -> None:
    form = type(tree)
    if form is tuple or form is list:
        for item in tree:  # most are leaves
            if isinstance(item, kind):
                found.append(item)
            elif type(item) not in _ATOMS:
                _collect(item, kind, found)
    elif isinstance(tree, kind):
        found.append(tree)
    elif form in _ATOMS:
        pass
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, kind, found)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _collect(item, kind, found)
    elif form is slice:
        _collect((tree.start, tree.stop, tree.step), kind, found)


def replaced(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Nested arguments with the leaves of this kind replaced, in order."""
    form = type(tree)
    if form is tuple or form is list:
        return form([replaced(item, kind, change) for item in tree])
    if isinstance(tree, kind):
        return change(tree)
    if form in _ATOMS:
        return tree
    if form is dict:
        return {name: replaced(item, kind, change) for name, item in tree.items()}
    if form is slice:
        return slice(*replaced([tree.start, tree.stop, tree.step], kind, change))
    if isinstance(tree, tuple) and form is not torch.Size:
        items = [replaced(item, kind, change) for item in tree]
        return form(*items) if hasattr(form, "_fields") else form(items)
    if isinstance(tree, list):
        return [replaced(item, kind, change) for item in tree]
    if isinstance(tree, dict):
        made = copy.copy(tree)
        for name, item in tree.items():
            made[name] = replaced(item, kind, change)
        return made
    return tree


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Nested arguments with every tensor changed."""
    return replaced(tree, torch.Tensor, change)


def substitute(tree: Any, feed: Iterator[torch.Tensor]) -> Any:
    """Nested arguments with the items of `feed` in place of their tensors, in order."""
    return replaced(tree, torch.Tensor, lambda _: next(feed))


def fill(tree: Any, values: Any) -> Any:
    """Nested arguments with `values[slot.index]` for each Slot."""
    form = type(tree)  # every call does this: the usual forms without a function per Slot
    if form is Slot:
        return values[tree.index]
    if form is tuple or form is list:
        return form([fill(item, values) for item in tree])
    if form in _ATOMS:
        return tree
    if form is dict:
        return {name: fill(item, values) for name, item in tree.items()}
    return replaced(tree, Slot, lambda slot: values[slot.index])
