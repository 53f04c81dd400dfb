"""Functions of torch that leave an argument out when they ask `__torch_function__`."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.trees import flatten

__all__ = ["keeping"]


def keeping(name: str, place: int | None = None) -> Callable[..., Any]:
    """A replacement for a function that drops its argument `name`, by position number `place`:
    where that is given, the body runs without asking, and its ops ask."""

    def call(original: FunctionType, *args: Any, **kwargs: Any) -> Any:
        is_given = name in kwargs or (place is not None and len(args) > place)
        if not is_given or not any(type(one) is ShardTensor for one in flatten((args, kwargs))):
            return original(*args, **kwargs)
        return _body(original)(*args, **kwargs)

    return call


def _body(original: FunctionType) -> FunctionType:
    names = {**original.__globals__, **dict.fromkeys(_ASKING, _no)}
    body = FunctionType(
        original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    body.__kwdefaults__ = original.__kwdefaults__
    return body


_ASKING = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _no(*_: Any) -> bool:
    return False
