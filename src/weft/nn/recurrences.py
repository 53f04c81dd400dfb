"""Linear recurrences over sequences, which loops over time steps write as h = a[t] * h + b[t]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.errors import LayoutError
from weft.ops.recurrences import RULE, recurrence
from weft.tensor import ShardTensor
from weft.tensor.call.own.functions import OwnFunction

__all__ = ["linear_scan"]

_SCAN = OwnFunction(RULE.name, recurrence, recurrence, RULE)


def linear_scan(
    a: Tensor, b: Tensor, dim: int, initial: Tensor | None = None, *, reverse: bool = False
) -> Tensor:
    """All states of a linear recurrence: h[t] = a[t] * h[t - 1] + b[t] along `dim`, elementwise.

    It replaces a loop over time steps, on plain tensors as well. If `dim` is sharded, the result
    stays sharded: ranks send each other a product and a state in one exchange forward and one
    backward, whatever the length. It is differentiable to any order. No number is divided, and
    half precision is computed in float32.

        states = weft.linear_scan(decay, x, dim=1, initial=state)

    Args:
        a: the factors, of any shape that broadcasts with that of `b`.
        b: the summands, of shape (..., length, ...).
        dim: the dim of time.
        initial: the state before the first step, of the broadcast shape without `dim`, or of a
            shape that broadcasts to it; zero by default.
        reverse: whether the last step comes first: h[t] = a[t] * h[t + 1] + b[t].

    Returns:
        The states, of the broadcast shape of `a` and `b`.

    Raises:
        LayoutError: shapes that do not broadcast, or a dim that they do not have.

    The method is a blocked scan (Blelloch, Prefix Sums and Their Applications, 1990); its gradient
    is a scan in the opposite direction (Martin, Cundy, Parallelizing Linear Recurrent Neural Nets
    Over Sequence Length, 2018).
    """
    shape, dim = _fitted(a, b, dim, initial)
    a, b = a.expand(shape), b.expand(shape)
    first = None if initial is None else initial.expand([*shape[:dim], *shape[dim + 1 :]])
    given = a, b, dim, first, reverse
    if any(isinstance(one, ShardTensor) for one in (a, b, first)):
        return ShardTensor.__torch_function__(_SCAN, (), given, {})
    return recurrence(*given)


def _fitted(a: Tensor, b: Tensor, dim: int, initial: Tensor | None) -> tuple[Sequence[int], int]:
    """The shape of the result, and the dim counted from the front."""
    call = "linear_scan(a, b, dim, initial)"
    try:
        shape = torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        raise LayoutError(
            call, f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}",
            "the shapes of a and b broadcast", [f"a: {tuple(a.shape)}", f"b: {tuple(b.shape)}"],
            "linear_scan(a.unsqueeze(-1), b, dim)") from None
    if not -len(shape) <= dim < len(shape):
        raise LayoutError(
            call, f"dim={dim}, and a and b have {len(shape)} dims",
            "dim is one of the dims of a and b", [f"dim={dim}"], f"dim={len(shape) - 1}"
            if shape else "linear_scan(a.unsqueeze(0), b.unsqueeze(0), 0)")
    dim %= len(shape)
    due = (*shape[:dim], *shape[dim + 1 :])
    if initial is not None:
        try:
            fits = torch.broadcast_shapes(initial.shape, due) == due
        except RuntimeError:
            fits = False
        if not fits:
            raise LayoutError(
                call, f"initial has shape {tuple(initial.shape)}, a step of a and b {due}",
                "initial broadcasts to the shape of one step",
                [f"initial: {tuple(initial.shape)}"], f"torch.zeros({due})")
    return shape, dim
