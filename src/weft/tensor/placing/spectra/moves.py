"""Moves of spectra between ranks, dim by dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weft.core import Layout
from weft.ops.transforms import handed_over, spread_over
from weft.tensor.modes import check_strict
from weft.tensor.placing.redistribute import redistribute_to
from weft.tensor.placing.transitions import transition_between
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["check_move", "one_by_one", "summed"]

_EVEN = 1.5
"""As of `ops.transforms`, but of modes, which are few: where they are sharded by modes, an inverse
transform leads back to the layout of the field."""


def one_by_one(
    x: Any, dims: Sequence[int], done: Sequence[int], transform: Callable[[Any, int], Any]
) -> Any:
    """Transform these dims, the last one first, after others. The axes of a sharded dim go where a
    transform of all of them would bring them."""
    done, pending = list(done), list(dims)
    while pending:
        dim = pending.pop()
        layout = x._meta.layout
        if layout.dims[dim]:
            x = _handed(x, handed_over(layout, dim, done, pending, _EVEN))
        x = transform(x, dim)
        done.append(dim)
    return x


def summed(x: ShardTensor, done: Sequence[int], pending: Sequence[int]) -> ShardTensor:
    """The tensor with its partial values summed; the axes go to dims that they divide."""
    layout = x._meta.layout
    axes = [axis for axis, kind in enumerate(layout.partial) if kind is not None]
    if not axes:
        return x
    return _handed(x, spread_over(layout.without_partial(), axes, done, pending, _EVEN)[0])


def _handed(x: ShardTensor, layout: Layout) -> ShardTensor:
    check_move(x, layout)
    return redistribute_to(x, layout, "rfftn")


def check_move(x: ShardTensor, layout: Layout) -> None:
    """Raise StrictError where strict mode forbids to bring a tensor to this layout."""
    move = transition_between(x._meta.mesh, x._meta.layout, layout, order=x._meta.order())
    if move is not None:
        check_strict("rfftn", move)
