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
    if sends(func):
        return refusal(func, [])
    kinds = [str(kind.__name__) for kind in types]
    if "sparse_" in str(func):
        return UnsupportedOpError(
            f"{func} (as of torch.sparse_coo_tensor)", "a ShardTensor holds indices or values",
            "ShardTensors are dense, and so is what a sparse tensor is made of on each rank", kinds,
            "torch.sparse_coo_tensor(indices, x.full_tensor(), size), of plain indices\n"
            "a dense one: weft.zeros(size, mesh=mesh).index_put(tuple(indices), x)")
    return UnsupportedOpError(
        f"{func}{_ASKED_BY.get(str(func), '')}",
        "a ShardTensor reached torch's dispatcher below autograd",
        "weft intercepts above autograd; forward AD, torch.jit, torch.tensor(x), some of "
        "torch.func and tensor classes of other libraries pass it by", kinds,
        "use the tensor method (x.clone(), x.detach(), x.to(dtype)), or x.full_tensor() "
        "and plain torch\n"
        "of torch.func: vmap, grad, vjp, jvp, jacrev, jacfwd and hessian, with the "
        "ShardTensors as arguments")
