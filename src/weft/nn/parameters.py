"""`parameter.data = x` for a ShardTensor x and a plain parameter.

torch would use x as the memory of the parameter, but x has none, and the process would end at
the first use. torch asks only the parameter's `__torch_function__`, so it is refused here.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from weft.errors import ModuleError
from weft.tensor import ShardTensor

__all__ = ["set_data"]


def set_data(original: Any, parameter: nn.Parameter, value: Any) -> None:
    if type(value) is ShardTensor:
        raise ModuleError(
            "parameter.data = x", f"x is a ShardTensor {value.sharding}, the parameter a "
            f"plain tensor of shape {tuple(parameter.shape)}",
            "a plain parameter's data is memory of one device", [str(value.sharding)],
            "module.weight = nn.Parameter(x), or weft.distribute_module(module, mesh, "
            'shardings={"weight": ...})')
    original(parameter, value)
