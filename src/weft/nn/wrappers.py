"""DistributedDataParallel around what weft distributes: refused, because gradients are reduced.

It would add up, over its process group, gradients that are those of the global loss already, and
send ShardTensors, which have no memory of their own, from C++.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from weft.errors import ModuleError, message
from weft.tensor import ShardTensor
from weft.tensor.takeover import take_over, twin_of
from weft.tensor.trace.trees import flatten

__all__ = ["install"]

_INIT: Any = twin_of(DistributedDataParallel.__init__)  # type: ignore[arg-type]
_FORWARD: Any = twin_of(DistributedDataParallel.forward)  # type: ignore[arg-type]
_MAX_SHOWN = 8


def install() -> None:
    """Look at what it wraps and what it is called with. Once per process."""
    take_over(DistributedDataParallel.__init__, _init)  # type: ignore[arg-type]
    take_over(DistributedDataParallel.forward, _forward)  # type: ignore[arg-type]


def _init(wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    held = [
        f"{name} {tensor.sharding}" for name, tensor in (
            *module.named_parameters(), *module.named_buffers()
        ) if type(tensor) is ShardTensor
    ]
    if held:
        raise _refusal(
            "DistributedDataParallel(module)", f"{len(held)} of the module's parameters and "
            "buffers are ShardTensors", held)
    _INIT(wrapper, module, *args, **kwargs)


def _forward(wrapper: Any, *inputs: Any, **kwargs: Any) -> Any:
    given = [tensor for tensor in flatten((inputs, kwargs)) if type(tensor) is ShardTensor]
    if given:
        raise _refusal(
            "DistributedDataParallel.forward(...)", f"{len(given)} of its inputs are ShardTensors",
            [str(tensor.sharding) for tensor in given])
    return _FORWARD(wrapper, *inputs, **kwargs)


def _refusal(call: str, facts: str, offenders: list[str]) -> ModuleError:
    more = len(offenders) - _MAX_SHOWN
    shown = offenders[:_MAX_SHOWN] + ([f"and {more} more"] if more > 0 else [])
    return ModuleError(
        message(call, facts, "weft reduces gradients itself: after backward they are those of the "
                "global loss, also of plain parameters", shown,
                "call the module itself, without the wrapper\n"
                "where a library wraps it (accelerate, Trainer of transformers): "
                "with weft.nn.as_one_process(): ... around all that the library does")
    )
