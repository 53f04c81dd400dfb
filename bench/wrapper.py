"""The least that a `__torch_function__` wrapper subclass can do: unwrap, run, wrap.

It has no layouts, checks nothing, knows no keyword tensors, nested lists, strides or devices,
and wraps one result. Whatever a real subclass does comes on top of this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
