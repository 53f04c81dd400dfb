"""Tensors with dims in stretches (`core.stretched`), as they are seen: in a layout of boxes.

Inside of `weft.sharded_factories()` a view may leave its rows where they are. What asks for a
rank's block, or for the value, gets those of the view as it is outside: a view of the same memory
whose data move now, which all ranks ask for. Its layout is known before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from weft.core import Layout, StretchedLayout
from weft.tensor.members import hooks
from weft.tensor.meta import Meta, kept
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.views.moved import unwrap_view

__all__ = ["boxed", "is_stretched", "joined", "seen", "view", "viewed"]


def is_stretched(tensor: Any) -> bool:
    return type(tensor) is ShardTensor and tensor._meta.layout.is_stretched


def view(x: torch.Tensor, func: Any, shape: Sequence[int]) -> torch.Tensor:
    """`func(x, shape)`, a view or reshape that may leave dims in stretches. Its recipes have a key
    of their own."""
    return func(x, shape)


def boxed(x: Any) -> Any:
    """The tensor in a layout of boxes, to which its rows move once: a collective. A tensor that is
    in one already is returned as it is."""
    if not is_stretched(x):
        return x
    in_graph = torch.is_grad_enabled() and x.requires_grad
    found = vars(x).setdefault("_boxed", {})
    if in_graph not in found:
        made = found[in_graph] = viewed(viewed(x, x._meta.layout.apart.shape), x.shape)
        node = unwrap_view(made._local).grad_fn
        if node is not None:  # what it has saved, a backward frees
            node.register_prehook(partial(_forget, weakref.ref(x)))
    return found[in_graph]


def _forget(of: weakref.ref[Any], gradients: Any) -> None:
    x = of()
    if x is not None:
        vars(x).pop("_boxed", None)


def viewed(x: Any, shape: Sequence[int]) -> Any:
    """`x.view(shape)` as outside of the context, whose mode this passes by."""
    return ShardTensor.__torch_function__(torch.Tensor.view, (ShardTensor,), (x, tuple(shape)))


def joined(x: Any, layout: StretchedLayout) -> Any:
    """A tensor that has the layout of the dims before they were joined, with them joined."""
    meta = x._meta
    local, here = x._local, meta.mesh.here
    local = local if here is None else local.reshape(layout.local_shape_at(here))
    return wrap(local, meta.replace(layout=layout, strides=None))


def seen(meta: Meta) -> Layout:
    """The layout of boxes of such a tensor. Nothing is sent."""
    layout = meta.layout
    if not layout.is_stretched:
        return layout
    layouts = meta.mesh.cache.setdefault("layouts seen", {})
    return kept(layouts, layout, lambda: hooks.layout_of_view(meta))
