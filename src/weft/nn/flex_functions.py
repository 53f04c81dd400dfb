"""Functions of `flex_attention` on a rank, which TorchDynamo traces, as it traces no others of
weft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention

__all__ = ["kernel", "masks_from", "scores_from"]

_Mod = Callable[..., Any]


def kernel(wanted: Sequence[int], *args: Any) -> Any:
    """The wanted results of torch's op, which has to be called by a function that is compiled."""
    found: Any = flex_attention(*args)
    return [found[at] for at in wanted]


def scores_from(function: _Mod, first: Sequence[Tensor]) -> _Mod:
    """A function of scores, at positions counted from the first sample, head and row of a rank."""
    def scores(score: Any, b: Any, h: Any, row: Any, column: Any, *buffers: Any) -> Any:
        return function(score, b + first[0], h + first[1], row + first[2], column, *buffers)

    return scores


def masks_from(function: _Mod, first: Sequence[Tensor]) -> _Mod:
    """A function of a mask, at such positions."""
    def masks(b: Any, h: Any, row: Any, column: Any, *buffers: Any) -> Any:
        return function(b + first[0], h + first[1], row + first[2], column, *buffers)

    return masks
