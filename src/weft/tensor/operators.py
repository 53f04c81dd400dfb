"""Operators and methods on the class itself, which saves torch's search for
`__torch_function__`."""

from __future__ import annotations

from typing import Any

import torch

from weft.tensor.shard_tensor import ShardTensor

__all__ = ["install"]

_Tensor: Any = torch.Tensor
_num_modes: Any = torch._C._len_torch_function_stack  # type: ignore[attr-defined]

_METHODS = (
    "__add__", "__sub__", "__rsub__", "__mul__", "__truediv__",
    "__pow__", "__matmul__", "__neg__", "__eq__", "__ne__",
    "__lt__", "__le__", "__gt__", "__ge__", "__iadd__", "__isub__", "__imul__", "__itruediv__",
    "add", "sub", "mul", "div", "add_", "mul_", "mm", "matmul", "relu", "view", "reshape",
    "transpose", "permute", "sum", "mean", "exp", "clone", "contiguous", "softmax", "unflatten",
    "flatten", "split", "copy_", "zero_",
)


def install() -> None:
    """Define them. Once per process."""
    for name in _METHODS:
        setattr(ShardTensor, name, _method(getattr(_Tensor, name)))
    for name in ("add", "mul", "truediv", "and", "or", "xor"):
        setattr(ShardTensor, f"__r{name}__", _reflected(
            getattr(_Tensor, f"__{name}__"), getattr(_Tensor, f"__r{name}__")))
    # No `__getitem__`: a Python one would make each tensor a sequence to C, and
    # torch.tensor([loss, other]) would ask for its length.


def _method(func: Any) -> Any:
    """An operator on the class: saves the 1 us that torch takes to find `__torch_function__`.

    While a TorchFunctionMode is on, torch asks that first.
    """
    intercept = ShardTensor.__torch_function__

    def method(*args: Any, **kwargs: Any) -> Any:
        if _num_modes():
            return func(*args, **kwargs)
        return intercept(func, None, args, kwargs)

    method.__name__, method.__doc__ = func.__name__, func.__doc__
    return method


def _reflected(forward: Any, reflected: Any) -> Any:
    """`other + x`. Python asks it before a plain tensor's own operator, whose operands have another
    order: the first one's strides count, and torch's `x.reciprocal() * other` rounds twice."""
    of_number = _method(reflected)

    def method(self: Any, other: Any) -> Any:
        return forward(other, self) if isinstance(other, _Tensor) else of_number(self, other)

    method.__name__ = reflected.__name__
    return method
