"""How the operands of a sample are laid out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout, Mesh, P

__all__ = ["MODULE_WAYS", "WAYS", "laid_out", "ways_of"]

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


def _whole(mesh: Mesh) -> Way:
    return lambda tensor: Layout(mesh, tuple(tensor.shape), P())


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
    "first partial": (_PAIR, lambda place: _whole(_PAIR) if place else _partial),
    "crossed": (_PAIR, lambda place: _ROWS if place else _cut(_PAIR, "x", last=True)),
}
"""Name -> mesh, and what lays out the operand at a place; None leaves it plain. Crossed: the last
dim of the first operand and the first one of the others, over which products sum."""


def _second(mesh: Mesh, axis: Any = "x") -> Way:
    """Cut along dim 1, where channels are; a tensor of one dim along that."""
    return lambda tensor: (
        _cut(mesh, None, axis)(tensor) if tensor.dim() > 1 else _cut(mesh, axis)(tensor)
    )


_COLUMNS = _cut(_PAIR, "x", last=True)

MODULE_WAYS: dict[str, tuple[Mesh, dict[str, Way]]] = {
    "batch": (_PAIR, {"input": _ROWS}),
    "batch ragged": (_THREE, {"input": _ragged, "parameter": _whole(_THREE),
                              "buffer": _whole(_THREE)}),
    "channels": (_PAIR, {"input": _second(_PAIR), "parameter": _ROWS, "buffer": _ROWS}),
    "channels uneven": (_THREE, {"input": _second(_THREE)}),
    "rows": (_PAIR, {"input": _ROWS, "parameter": _ROWS, "buffer": _ROWS}),
    "last": (_PAIR, {"input": _COLUMNS, "parameter": _COLUMNS}),
    "middle": (_PAIR, {"input": _middle}),
    "square": (_SQUARE, {"input": _cut(_SQUARE, "dp", "tp"), "parameter": _cut(_SQUARE, "tp"),
                         "buffer": _cut(_SQUARE, "tp")}),
    "batch and weights": (_SQUARE, {"input": _cut(_SQUARE, "dp"), "parameter": _cut(_SQUARE, "tp"),
                                    "buffer": _whole(_SQUARE)}),
    "order": (_SQUARE, {"input": _cut(_SQUARE, None, ("tp", "dp"))}),
    "weights": (_PAIR, {"parameter": _ROWS}),
    "partial": (_PAIR, {"input": _partial, "parameter": _whole(_PAIR)}),
}
"""Of modules: what lays out inputs, parameters and buffers; those not named stay plain."""


def ways_of(roles: tuple[str, ...]) -> list[str]:
    """The names of the ways, of a module or an op."""
    return list(MODULE_WAYS if roles else WAYS)


def laid_out(
    way: str, tensors: tuple[Tensor, ...], roles: tuple[str, ...] = ()
) -> tuple[Mesh, list[Layout | None]] | None:
    """The mesh and a layout per tensor; None where the way is no other than one before it."""
    if roles:
        return _module_laid_out(way, tensors, roles)
    mesh, pick = WAYS[way]
    ways = [pick(place) for place in range(len(tensors))]
    layouts = [None if lay is None else lay(tensor) for lay, tensor in zip(ways, tensors)]
    if way.startswith(("first", "crossed")) and len(tensors) < 2:
        return None
    if way == "crossed" and min(tensors[0].dim(), max(one.dim() for one in tensors[1:])) < 2:
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


def _module_laid_out(
    way: str, tensors: tuple[Tensor, ...], roles: tuple[str, ...]
) -> tuple[Mesh, list[Layout | None]] | None:
    mesh, pick = MODULE_WAYS[way]
    if not set(roles) & set(pick):
        return None
    inputs = [tensor for tensor, role in zip(tensors, roles) if role == "input"]
    largest = max(tensor.dim() for tensor in inputs)
    if largest < {"middle": 3, "last": 2, "channels": 2, "channels uneven": 2, "order": 2}.get(
        way, 0
    ):
        return None
    ways = [pick.get(role) for role in roles]
    return mesh, [None if lay is None else lay(tensor) for lay, tensor in zip(ways, tensors)]
