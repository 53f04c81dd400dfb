"""TorchScript, tracers and torch.export: they write a program down as ops on plain tensors.

What they would write down of a ShardTensor is this rank's block, or a wrapper without data. They
are refused where they are given one, where a module that holds one is given to them, and (by the
general route, see `modes`) where a traced program closes over one. `torch.cond` needs no capture:
it reads the predicate and runs a branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _recursive

from weft.errors import UnsupportedOpError, message
from weft.tensor.call.own.functions import is_sharded
from weft.tensor.modes import tracing
from weft.tensor.takeover import twin_of

__all__ = ["TAKEN", "install_on_script"]


def _refused(call: str, facts: str, rule: str, fix: str) -> UnsupportedOpError:
    return UnsupportedOpError(message(call, facts, rule, [call.partition("(")[0]], fix))


def _held(module: Any) -> list[Any]:
    """The parameters and buffers of what may be a module."""
    is_module = isinstance(module, torch.nn.Module)
    return [*module.parameters(), *module.buffers()] if is_module else []


def _trace(func: Any, *args: Any, **kwargs: Any) -> Any:
    if is_sharded(_held(func), args, kwargs):
        raise _refused(
            "torch.jit.trace(func, example_inputs)",
            "ShardTensors are among the examples or the parameters",
            "a trace records ops on plain tensors alone",
            "call func itself, or trace it with x.to_local()",
        )
    with tracing():
        return _TRACE(func, *args, **kwargs)


def _trace_module(module: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    if is_sharded(_held(module), inputs):
        raise _refused(
            "torch.jit.trace_module(mod, inputs)",
            "ShardTensors are among the examples or the parameters",
            "a trace records ops on plain tensors alone",
            "call the module itself, or trace it before weft.distribute_module()",
        )
    with tracing():
        return _TRACE_MODULE(module, inputs, *args, **kwargs)


def _trace_graph(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What counts operations by a trace begins here, as fvcore does."""
    if is_sharded(_held(func), args, kwargs):
        raise _refused(
            "torch.jit._get_trace_graph(f, args)",
            "ShardTensors are among the arguments or the parameters",
            "a trace records ops on plain tensors alone",
            "trace the module on plain tensors, before weft.distribute_module() (fvcore's "
            "FlopCountAnalysis, too); of the work of this rank: "
            "torch.utils.flop_counter.FlopCounterMode",
        )
    with tracing():
        return _TRACE_GRAPH(func, *args, **kwargs)


def _script(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Where torch.jit.script compiles a module."""
    if is_sharded(_held(module)):
        raise _refused(
            "torch.jit.script(module)", "ShardTensors are among its parameters or buffers",
            "TorchScript runs ops on plain tensors alone",
            "call the module itself, unscripted",
        )
    return _CREATE_MODULE(module, *args, **kwargs)


def _export(module: Any, args: Any, kwargs: Any = None, **options: Any) -> Any:
    if is_sharded(_held(module), args, kwargs or {}):
        raise _refused(
            "torch.export.export(mod, args)",
            "ShardTensors are among the arguments or the parameters",
            "an exported graph knows ops on plain tensors, and neither layouts nor communication",
            "export the module on plain tensors, before weft.distribute_module()",
        )
    return _EXPORT(module, args, kwargs, **options)


def _nested(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    if is_sharded(tensors):
        raise _refused(
            "torch.nested.as_nested_tensor(ts)", "ShardTensors are among the tensors",
            "a nested tensor lies in the memory of one process",
            "torch.nested.as_nested_tensor([x.full_tensor() for x in ts])",
        )
    return _NESTED(tensors, *args, **kwargs)


def _linearize(func: Any, *primals: Any) -> Any:
    if is_sharded(primals):
        raise _refused(
            "torch.func.linearize(func, *primals)", "ShardTensors are among the primals",
            "forward AD, vmap and torch.func do not reach through communication",
            "torch.autograd.functional.jvp(func, x, v)",
        )
    return _LINEARIZE(func, *primals)


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    if not is_sharded(pred, operands):
        return _COND(pred, true_fn, false_fn, operands)
    return (true_fn if bool(pred) else false_fn)(*operands)


_TRACE: Any = twin_of(torch.jit.trace)  # type: ignore[arg-type]
_TRACE_MODULE: Any = twin_of(torch.jit.trace_module)  # type: ignore[arg-type]
_TRACE_GRAPH: Any = twin_of(torch.jit._get_trace_graph)  # type: ignore[arg-type]
_CREATE_MODULE: Any = twin_of(_recursive.create_script_module)
_EXPORT: Any = twin_of(torch.export.export)  # type: ignore[arg-type]
_NESTED: Any = twin_of(torch.nested.as_nested_tensor)  # type: ignore[arg-type]
_LINEARIZE: Any = twin_of(torch.func.linearize)  # type: ignore[arg-type]
_COND: Any = twin_of(torch.cond)  # type: ignore[arg-type]

TAKEN: list[tuple[Any, Callable[..., Any]]] = [
    (torch.jit.trace, _trace), (torch.jit.trace_module, _trace_module),
    (torch.jit._get_trace_graph, _trace_graph),
    (_recursive.create_script_module, _script), (torch.export.export, _export),
    (torch.nested.as_nested_tensor, _nested), (torch.func.linearize, _linearize),
    (torch.cond, _cond),
]


def install_on_script() -> None:
    """Compiled functions and methods are objects of C, called by their classes' `__call__`."""
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        kind.__call__ = _scripted(kind.__call__)


def _scripted(original: Any) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_sharded(args, kwargs):
            raise _refused(
                f"{self.name}(...), which torch.jit.script compiled",
                "ShardTensors are among its arguments",
                "TorchScript runs ops on plain tensors alone",
                "call the function itself, unscripted, or with x.to_local()",
            )
        return original(self, *args, **kwargs)

    return call
