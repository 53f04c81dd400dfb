"""torch's wrappers of modules, which refuse modules of ShardTensors: weft does what they do.

`fully_shard` and FSDP cut each rank's own parameters and DDP sums its own gradients; of what lies
on a mesh already they would make something else, or bring the backend to abort. Importing FSDP
takes as long as a third of weft, so it is met when somebody else imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from weft.errors import ModuleError, message
from weft.tensor import ShardTensor
from weft.tensor.takeover import take_over, twin_of
from weft.tensor.trace.trees import flatten

__all__ = ["install", "refuse_wrapped"]

_FSDP = "torch.distributed.fsdp"
_AT_IMPORT: dict[str, Callable[[Any], None]] = {
    f"{_FSDP}._fully_shard._fully_shard": lambda module: _take(
        "fully_shard(module)", module.fully_shard, 0),
    f"{_FSDP}.fully_sharded_data_parallel": lambda module: _take(
        "FullyShardedDataParallel(module)", module.FullyShardedDataParallel.__init__, 1),
}
"""Module of torch -> what is to be done with it when it has been imported."""


_LIBRARIES = (
    "where a library wraps it (accelerate, Trainer of transformers): "
    "with weft.nn.as_one_process(): ... around all that the library does"
)


def install() -> None:
    """Take them over, those that are imported later at their import. Once per process."""
    _take_inputs(nn.parallel.DistributedDataParallel.forward)
    _take("DistributedDataParallel(module)", nn.parallel.DistributedDataParallel.__init__, 1)
    for name, take in _AT_IMPORT.items():
        if name in sys.modules:
            take(sys.modules[name])
    sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finds what Python would find anyway, and has it taken over once it is there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        take = _AT_IMPORT.get(fullname)
        spec = None if take is None else PathFinder.find_spec(fullname, path, target)
        if take is None or spec is None or spec.loader is None:
            return None
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            take(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _take(call: str, function: Any, place: int) -> None:
    """Have `function` look at its module, the positional argument of this number."""
    original: FunctionType = twin_of(function)

    def answer(*args: Any, **kwargs: Any) -> Any:
        refuse_wrapped(call, args[place] if len(args) > place else kwargs.get("module"))
        return original(*args, **kwargs)

    take_over(function, answer)


def _take_inputs(function: Any) -> None:
    """Have the forward of DistributedDataParallel look at its inputs: around a plain module, too,
    gradients of the global loss would be summed again."""
    original: FunctionType = twin_of(function)

    def answer(wrapper: Any, *inputs: Any, **kwargs: Any) -> Any:
        given = [one for one in flatten((inputs, kwargs)) if type(one) is ShardTensor]
        if given:
            raise ModuleError(
                message("DistributedDataParallel.forward(...)", f"{len(given)} of its inputs are "
                        "ShardTensors", "weft sums the gradients of replicated parameters over the "
                        "mesh, plain ones too", [str(one.sharding) for one in given],
                        f"call the module itself, without the wrapper\n{_LIBRARIES}")
            )
        return original(wrapper, *inputs, **kwargs)

    take_over(function, answer)


def refuse_wrapped(call: str, given: Any) -> None:
    """Raise where a module that a wrapper is to take holds ShardTensors.

    Raises:
        ModuleError: it does.
    """
    modules = [
        one for one in (given if isinstance(given, (list, tuple)) else [given])
        if isinstance(one, nn.Module)
    ]
    tensors = [
        named for module in modules
        for named in chain(module.named_parameters(), module.named_buffers())
    ]
    held = [f"{name}: {one.sharding}" for name, one in tensors if isinstance(one, ShardTensor)]
    if held:
        raise ModuleError(
            message(call, f"{len(held)} of {len(tensors)} parameters and buffers are ShardTensors",
                    "a module on a mesh needs no wrapper: weft sums the gradients of replicated "
                    "parameters over the mesh, and gathers those that are cut for their use",
                    held[:8] + [f"and {len(held) - 8} more"] * (len(held) > 8),
                    "leave the wrapper out. With the batch cut over dp, "
                    'weft.distribute_module(module, mesh, shardings={"*": P("dp")}) does what '
                    f"fully_shard does, and without shardings= what DDP does\n{_LIBRARIES}")
        )
