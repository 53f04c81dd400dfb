"""Optimizers that were built before their module was distributed, and the state they load.

`distribute_module` replaces the parameters of the module. An optimizer that holds the old ones
would continue to step them: the model would silently stay the same. So it is refused, before
anything is replaced if the optimizer can be seen by then, else at its first step.

Loaded state, from full tensors or ShardTensors of any layout, takes the layout of its
parameter. Otherwise it would be whole on every rank, and each step would move it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from weft.errors import ModuleError
from weft.nn.named import Named
from weft.tensor import ShardTensor
from weft.tensor.placing.marked import Marked

__all__ = ["add_param_group", "as_parameter", "install", "refuse_holders", "replaced"]

_OPTIMIZERS: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def add_param_group(original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Every optimizer that is built calls this."""
    _OPTIMIZERS.add(optimizer)
    original(optimizer, *args, **kwargs)


def as_parameter(
    original: Any, param: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """A value loaded for a parameter with the parameter's elements, in the parameter's layout.

    Others (step counts, rows and columns of a factored second moment) stay as they are.
    """
    value = original(param, value, *args, **kwargs)
    if type(param) is not ShardTensor or value.shape != param.shape or not value.dim():
        return value
    if param.sharding.is_partial or value.is_meta != param.is_meta:
        return value
    if type(value) is ShardTensor:
        value = value.detach().redistribute(param.device_mesh, param.sharding)
    with torch.no_grad():  # fused updates also need it in the parameter's memory order
        return torch.empty_like(param, dtype=value.dtype).copy_(value)


def replaced(name: str, parameter: torch.Tensor) -> None:
    """Remember that `distribute_module` has replaced a parameter."""
    _REPLACED.mark(parameter, name)


def refuse_holders(tensors: Iterable[Named]) -> None:
    """Raises ModuleError if an optimizer holds a parameter that is about to be replaced."""
    names = {id(named.tensor): named.name for named in tensors}
    if not _holders(names):
        return
    gc.collect()  # a dropped optimizer may still be in a cycle
    held = _holders(names)
    if held:
        raise _built_before("distribute_module(module)", held)


def _holders(names: dict[int, str]) -> dict[str, list[str]]:
    held: dict[str, list[str]] = {}
    for optimizer in list(_OPTIMIZERS):
        held_by = [one for group in optimizer.param_groups for one in group["params"]]
        found = [names[id(one)] for one in held_by if id(one) in names]
        if found:
            held.setdefault(type(optimizer).__name__, []).extend(found)
    return held


def _refuse_step(optimizer: Optimizer, found: Sequence[tuple[torch.Tensor, str]]) -> None:
    kind = type(optimizer).__name__
    raise _built_before(f"{kind}.step()", {kind: [name for _, name in found]})


_REPLACED = Marked(_refuse_step)
"""Parameters that have been replaced -> their names."""

install = _REPLACED.install


def _built_before(call: str, held: dict[str, Sequence[str]] | dict[str, list[str]]) -> ModuleError:
    count = sum(map(len, held.values()))
    kinds = ", ".join(held)
    return ModuleError(
        call, f"an optimizer ({kinds}) holds {count} of the module's parameters as they "
        "were before distribution",
        "an optimizer is built of the parameters that distribution has put there",
        [name for names in held.values() for name in names],
        "distribute_module(module, mesh, ...)\n"
        f"optimizer = torch.optim.{next(iter(held))}(module.parameters(), ...)")
