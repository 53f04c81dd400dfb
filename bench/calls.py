"""One call: add, mm, relu, view; the local tensor is 8x8 float32 in every system."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench import world
from bench.item import Figure, Row, timed
from bench.wrapper import MethodWrapper, Wrapper, wrap
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
