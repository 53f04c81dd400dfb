"""How the operands of a sample are laid out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout, Mesh, P

__all__ = ["WAYS", "laid_out"]

_PAIR, _THREE, _SQUARE = Mesh({"x": 2}), Mesh({"x": 3}), Mesh({"dp": 2, "tp": 2})

Way = Callable[[Tensor], Layout]


def _cut(mesh: Mesh, *axes: Any, last: bool = False) -> Way:
    def way(tensor: Tensor) -> Layout:
        ndim = tensor.dim()
        entries = [None] * (ndim - 1) + [axes[0]] if last and ndim else list(axes)[:ndim]
        return Layout(mesh, tuple(tensor.shape), P(*entries))

    return way


def _middle(tensor: Tensor) -> Layout:
    ndim = tensor.dim()
    entries = [None] * (ndim // 2) + ["x"] if ndim else []
    return Layout(_PAIR, tuple(tensor.shape), P(*entries))


def _ragged(tensor: Tensor) -> Layout:
    """The rank in the middle holds nothing."""
    if not tensor.dim():
        return Layout(_THREE, (), P())
    length = tensor.shape[0]
    few = min(1, length)
    return Layout(_THREE, tuple(tensor.shape), P("x"), sizes={0: (length - few, 0, few)})


def _partial(tensor: Tensor) -> Layout:
    return Layout(_PAIR, tuple(tensor.shape), P(partial=_sum(tensor, "x")))


def _half_partial(tensor: Tensor) -> Layout:
    entries = ["dp"] if tensor.dim() else []
    return Layout(_SQUARE, tuple(tensor.shape), P(*entries, partial=_sum(tensor, "tp")))


def _sum(tensor: Tensor, axis: str | int) -> dict[str | int, str] | None:
    return None if tensor.dtype == torch.bool else {axis: "sum"}


_ROWS = _cut(_PAIR, "x")

WAYS: dict[str, tuple[Mesh, Callable[[int], Way | None]]] = {
    "rows": (_PAIR, lambda place: _ROWS),
    "last": (_PAIR, lambda place: _cut(_PAIR, "x", last=True)),
    "middle": (_PAIR, lambda place: _middle),
    "uneven": (_THREE, lambda place: _cut(_THREE, "x")),
    "ragged": (_THREE, lambda place: _ragged),
    "square": (_SQUARE, lambda place: _cut(_SQUARE, "dp", "tp")),
    "order": (_SQUARE, lambda place: _cut(_SQUARE, ("tp", "dp"))),
    "partial": (_PAIR, lambda place: _partial),
    "half partial": (_SQUARE, lambda place: _half_partial),
    "first plain": (_PAIR, lambda place: _ROWS if place else None),
    "first only": (_PAIR, lambda place: None if place else _ROWS),
}
"""Name -> mesh, and what lays out the operand at a place; None leaves it plain."""


def laid_out(way: str, tensors: tuple[Tensor, ...]) -> tuple[Mesh, list[Layout | None]] | None:
    """The mesh and a layout per tensor; None where the way is no other than one before it."""
    mesh, pick = WAYS[way]
    ways = [pick(place) for place in range(len(tensors))]
    layouts = [None if lay is None else lay(tensor) for lay, tensor in zip(ways, tensors)]
    if way.startswith("first") and len(tensors) < 2:
        return None
    widest = max(tensor.element_size() for tensor in tensors)
    for place, (tensor, layout) in enumerate(zip(tensors, layouts)):
        if layout is not None and layout.is_partial and tensor.element_size() < widest:
            # Terms round as their dtype does, which the result's does not show.
            layouts[place] = layout.replace(partial=[None] * layout.mesh.ndim)
    largest = max(tensor.dim() for tensor in tensors)
    if (way == "last" and largest < 2) or (way == "middle" and largest < 3):
        return None
    return mesh, layouts
