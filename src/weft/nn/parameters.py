"""`parameter.data = x`, where x is a ShardTensor and the parameter a plain tensor.

torch would take it for the memory of the parameter, which it has not, and the process would end at
the first use. torch asks `__torch_function__` of the parameter alone, so it is refused here.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from weft.errors import ModuleError, message
from weft.tensor import ShardTensor

__all__ = ["set_data"]


def set_data(original: Any, parameter: nn.Parameter, value: Any) -> None:
    if type(value) is ShardTensor:
        raise ModuleError(
            message("parameter.data = x", f"x is a ShardTensor {value.sharding}, the parameter a "
                    f"plain tensor of shape {tuple(parameter.shape)}",
                    "a plain parameter's data is memory of one device", [str(value.sharding)],
                    "module.weight = nn.Parameter(x), or weft.distribute_module(module, mesh, "
                    'shardings={"weight": ...})')
        )
    original(parameter, value)
