"""A parameter that is gathered while its module runs, taken as the shard that it is otherwise.

Its value is the gathered one then. What belongs to the leaf is the shard's: gradient and hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["on_shard"]


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
