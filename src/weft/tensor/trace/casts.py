"""Casts that autocast keeps: of a parameter it makes one, which lives until its region ends.

Of tensors without memory torch casts and keeps nothing. `as_autocast` casts those, and here is what
it keeps of them.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from weft.core.scopes import Inside

__all__ = ["KEEPS", "cast", "forget"]

KEEPS = Inside()
"""Whether anybody says when a region ends."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.kept: dict[tuple[int, torch.dtype, bool], tuple[Tensor, Tensor]] = {}


_thread = _Thread()


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in this dtype, as autocast gives it to an op."""
    if not (
        KEEPS.on and tensor.is_meta and tensor.requires_grad and tensor.is_leaf
        and not tensor._is_view() and tensor.dtype is torch.float32
        and torch.is_autocast_cache_enabled()
    ):
        return tensor.to(dtype)
    key = id(tensor), dtype, torch.is_grad_enabled()
    if key not in _thread.kept:
        _thread.kept[key] = tensor, tensor.to(dtype)  # the parameter lives, so that its id is its
    return _thread.kept[key][1]


def forget() -> None:
    """The outermost region of autocast has ended."""
    _thread.kept.clear()
