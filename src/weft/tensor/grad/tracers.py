"""Functions for plain tensors only: TorchScript, tracers, torch.export, nested tensors, edges.

Tracers would record this rank's block, or a wrapper without data; others read memory in C++.
All are refused in the same way if they are given a ShardTensor or a module that holds one, and (by
the general route, see `modes`) if a traced program closes over one. `torch.cond` needs no capture:
it reads the predicate and runs one branch. A function that `torch.jit.script` compiled is called as
the Python function that it was made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.jit._state import _try_get_jit_cached_function

from weft.errors import UnsupportedOpError
from weft.tensor.call.own.functions import is_sharded
from weft.tensor.modes import STRICT
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.trees import flatten

__all__ = ["cond", "refuse_while_tracing", "refusing", "scripted"]

_FIX = """leave the call out, and call the function or the module itself; or give it plain tensors:
x.full_tensor(), x.to_local(), a module before weft.distribute_module()"""


def refusing(call: str, fix: str = _FIX) -> Callable[..., Any]:
    """The replacement for a function that users know as `call`: it raises UnsupportedOpError if
    arguments, or parameters of modules, are ShardTensors."""
    def look(original: Any, *args: Any, **kwargs: Any) -> Any:
        _check(call, fix, args, kwargs)
        return original(*args, **kwargs)

    return look


def refuse_while_tracing(original: Any, *args: Any, **kwargs: Any) -> Any:
    """The same for tracers; while they run, any use of a ShardTensor is refused."""
    # `torch.jit.trace` is at home in `torch.jit._trace`.
    _check(f"{original.__module__.partition('._')[0]}.{original.__name__}", _FIX, args, kwargs)
    with STRICT.counted():  # calls go by the general route, which sees whether it runs
        return original(*args, **kwargs)


def _check(call: str, fix: str, args: Any, kwargs: Any) -> None:
    given = [*args, *kwargs.values()]
    modules = [one for one in given if isinstance(one, torch.nn.Module)]
    held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    if is_sharded(held, args, kwargs):
        found = [one for one in flatten((held, args, kwargs)) if type(one) is ShardTensor]
        raise UnsupportedOpError(
            f"{call}(...)", f"{len(found)} ShardTensors are among its arguments, or the "
            "parameters and buffers of a module",
            "it works on plain tensors alone, and knows neither layouts nor communication",
            list(dict.fromkeys(str(one.sharding) for one in found)), fix)


def cond(original: Any, pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """`torch.cond`: with ShardTensors the predicate is read."""
    if not is_sharded(pred, operands):
        return original(pred, true_fn, false_fn, operands)
    return (true_fn if bool(pred) else false_fn)(*operands)


def scripted(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """A TorchScript function or method: with ShardTensors the Python function that
    `torch.jit.script` compiled. What was traced took one branch of it, and is refused."""
    if is_sharded(args, kwargs):
        source = getattr(function, "_torchdynamo_inline", None)
        compiled = None if source is None else _try_get_jit_cached_function(source)
        if compiled is not None and compiled.qualified_name == function.qualified_name:
            return source(*args, **kwargs)  # type: ignore[misc]
        _check("a TorchScript function", _FIX, args, kwargs)
    return original(function, *args, **kwargs)
