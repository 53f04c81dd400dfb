"""Ops that reach torch's dispatcher below autograd, where a ShardTensor has no data, are
refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.errors import UnsupportedOpError
from weft.tensor.torch_collectives import refusal, sends

__all__ = ["refused_below_autograd"]

_ASKED_BY = {
    "aten.detach.default": " (as of torch.tensor(x))",
    "aten._to_copy.default": " (as of torch.as_tensor(x, dtype), torch.asarray(x, dtype))",
    "aten.clone.default": " (as of torch.asarray(x, copy=True))",
    "aten.alias.default": " (as of torch.Tensor(x), x.as_subclass(cls))",
}
"""What torch does not show `__torch_function__`."""


def refused_below_autograd(func: Any, types: Iterable[type]) -> UnsupportedOpError:
    """The error of an op there."""
    if sends(func):
        return refusal(func, [])
    return UnsupportedOpError(
        f"{func}{_ASKED_BY.get(str(func), '')}",
        "a ShardTensor reached torch's dispatcher below autograd",
        "weft intercepts above autograd; forward AD, torch.jit, torch.tensor(x) and some of "
        "torch.func pass it by", [str(kind.__name__) for kind in types],
        "use the tensor method (x.clone(), x.detach(), x.to(dtype)), or x.full_tensor() "
        "and plain torch\n"
        "of torch.func: vmap, grad, vjp, jvp, jacrev, jacfwd and hessian, with the "
        "ShardTensors as arguments")
