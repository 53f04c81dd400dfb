"""One call: add, mm, relu, view; the local tensor is 8x8 float32 in every system."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
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


def _dtensors(grad: bool) -> list[Tensor]:
    x, y, w = _operands(False)
    cut = [DTensor.from_local(one, world.line(), [Shard(0)]) for one in (x, y)]
    return [cut[0].requires_grad_(grad), cut[1],
            DTensor.from_local(w, world.line(), [Replicate()])]


def _shard_tensors(grad: bool) -> list[Tensor]:
    x, y, w = _operands(False)
    mesh, spec = world.weft_line(), weft.P("dp")
    cut = [ShardTensor.from_local(one, mesh, spec, sizes="chunk",
                                  shape=(SIDE * world.NUM_RANKS, SIDE)) for one in (x, y)]
    return [cut[0].requires_grad_(grad), cut[1], ShardTensor.from_local(w, mesh, weft.P())]


def _wrappers(cls: type[Wrapper], grad: bool) -> list[Tensor]:
    return [wrap(cls, one) for one in _operands(grad)]


def _row(name: str, grad: bool, num_rounds: int) -> Row:
    method, call = CALLS[name]
    many = SIDE * world.NUM_RANKS
    systems = {
        "plain": call(*_operands(grad), SIDE),
        "wrapper": call(*_wrappers(Wrapper, grad), SIDE),
        "wrapper, methods": call(*_wrappers(MethodWrapper, grad), SIDE),
        "weft": call(*_shard_tensors(grad), many),
        "DTensor": call(*_dtensors(grad), many),
    }
    defined = method is not None and getattr(ShardTensor, method) is not getattr(Tensor, method)
    base = "wrapper, methods" if defined else "wrapper"
    return timed(
        name + (", grad" if grad else ""), systems, num_rounds,
        lambda times: [Figure(f"over {base}", times.over("weft", base), OVER_WRAPPER_US, "µs")],
    )


def measure(num_rounds: int) -> list[Row]:
    return [_row(name, grad, num_rounds) for grad in (False, True) for name in CALLS]
