"""Users' own ops with rules and handlers, for simulated ranks and gloo alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import weft
from tests.cases.backward import full
from weft import P, ShardTensor


@contextmanager
def rule(op: Any, *args: Any, **options: Any) -> Iterator[Any]:
    """A rule for a while."""
    weft.register_rule(op, *args, **options)
    try:
        yield op
    finally:
        weft.unregister_rule(op)


class Product(torch.autograd.Function):
    """A product with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return (grad @ w.T if ctx.needs_input_grad[0] else None,
                x.T @ grad if ctx.needs_input_grad[1] else None)


def centered(x: Tensor) -> Tensor:
    """Less its mean over all elements."""
    return x - x.mean()


def _centered(x: Any) -> Any:
    total = ShardTensor.from_local(x.to_local().sum(), x.device_mesh, P(partial=_cut(x)))
    mean = total.redistribute(placements=P()) / x.numel()
    varying = [weft.Partial() if axis in _cut(x) else weft.Replicate()
               for axis in x.device_mesh.axis_names]
    local = x.to_local() - mean.to_local(grad_placements=varying)
    return ShardTensor.from_local(local, x.device_mesh, x.sharding)


def _cut(x: Any) -> dict[Any, str]:
    return {axis: "sum" for entry in x.spec.entries if entry
            for axis in (entry if isinstance(entry, tuple) else (entry,))}


def register() -> None:
    weft.register_rule(Product, "m k, k n -> m n", linear=[0, 1])
    weft.register_handler(centered, _centered)


def unregister() -> None:
    weft.unregister_rule(Product)
    weft.unregister_handler(centered)


def own_ops(mesh: Any) -> list[Tensor]:
    """Results and gradients of ops with a rule and with a handler; plain where mesh is None."""
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
    w = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)
    if mesh is not None:
        register()  # on every rank; simulated ones share what is registered
    found = []
    for left, right in (("dp", None), (("dp", "tp"), None), (None, "tp"), (None, None)):
        a, b = x.clone(), w.clone()
        if mesh is not None:
            a = weft.distribute_tensor(a, mesh, P(left, "tp" if left == "dp" else None))
            b = weft.distribute_tensor(b, mesh, P(right))
        a.requires_grad_()
        b.requires_grad_()
        y = centered(Product.apply(centered(a), b).tanh())
        (y * y).sum().backward()
        found += [full(one) for one in (y.detach(), a.grad, b.grad)]
    return found
