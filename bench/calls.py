"""One call: add, mm, relu, view; the local tensor is 8x8 float32 in every system.

Beside weft stands the least that a `__torch_function__` wrapper subclass can do: unwrap, run, wrap.
It has no layouts, checks nothing, knows no keyword tensors, nested lists, strides or devices, and
wraps one result. Whatever a real subclass does comes on top of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import world
from bench.timing import Figure, Row, timed
from weft import ShardTensor

SIDE = 8
OVER_WRAPPER_US = 1.0

CALLS: dict[str, tuple[str | None, Callable[..., Callable[[], object]]]] = {
    "add": ("__add__", lambda x, y, w, rows: lambda: x + y),
    "mm": (None, lambda x, y, w, rows: lambda: torch.mm(x, w)),
    "relu": (None, lambda x, y, w, rows: lambda: torch.relu(x)),
    "view": ("view", lambda x, y, w, rows: lambda: x.view(rows, 2, 4)),
}
"""The method that a subclass may define, and the call on x and y (rows cut) and w (whole)."""

_make = torch.Tensor._make_wrapper_subclass


class Wrapper(Tensor):
    """Reached by way of `__torch_function__` alone."""

    local: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*[a.local if type(a) is cls else a for a in args], **(kwargs or {}))
        result = _make(cls, out.shape, dtype=out.dtype)
        result.local = out
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} reached the wrapper itself")


class MethodWrapper(Wrapper):
    """With the operators and methods that are timed defined on the class, which is faster."""

    def __add__(self, other: Any) -> Any:
        out = self.local + (other.local if type(other) is MethodWrapper else other)
        result = _make(MethodWrapper, out.shape, dtype=out.dtype)
        result.local = out
        return result

    def view(self, *shape: int) -> Any:  # type: ignore[override]
        out = self.local.view(*shape)
        result = _make(MethodWrapper, out.shape, dtype=out.dtype)
        result.local = out
        return result


def wrap(cls: type[Wrapper], local: Tensor) -> Wrapper:
    """A wrapper around `local`."""
    result = _make(cls, local.shape, dtype=local.dtype)
    result.local = local
    return result


def _operands(grad: bool) -> list[Tensor]:
    torch.manual_seed(0)
    x, y, w = (torch.randn(SIDE, SIDE) for _ in range(3))
    return [x.requires_grad_(grad), y, w]


def _laid(lay: world.Lay, grad: bool) -> list[Tensor]:
    x, y, w = _operands(False)
    return [lay(x, 0).requires_grad_(grad), lay(y, 0), lay(w, None)]


def _wrappers(cls: type[Wrapper], grad: bool) -> list[Tensor]:
    return [wrap(cls, one) for one in _operands(grad)]


def _row(name: str, grad: bool, num_rounds: int) -> Row:
    method, call = CALLS[name]
    many = SIDE * world.NUM_RANKS
    systems = {
        "plain": call(*_operands(grad), SIDE),
        "wrapper": call(*_wrappers(Wrapper, grad), SIDE),
        "wrapper, methods": call(*_wrappers(MethodWrapper, grad), SIDE),
        "weft": call(*_laid(world.lay_weft(world.weft_line()), grad), many),
        "DTensor": call(*_laid(world.lay_dtensor(world.line()), grad), many),
    }
    defined = method is not None and getattr(ShardTensor, method) is not getattr(Tensor, method)
    base = "wrapper, methods" if defined else "wrapper"
    return timed(
        name + (", grad" if grad else ""), systems, num_rounds,
        lambda times: [Figure(f"over {base}", times.over("weft", base), OVER_WRAPPER_US, "µs")],
    )


def measure(num_rounds: int) -> list[Row]:
    return [_row(name, grad, num_rounds) for grad in (False, True) for name in CALLS]
