"""`parameter.data = x`, where x is a ShardTensor and the parameter a plain tensor.

torch would take it for the memory of the parameter, which it has not, and the process would end at
the first use. torch asks `__torch_function__` of the parameter alone, so it is refused here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.errors import ModuleError, message
from weft.tensor import ShardTensor

__all__ = ["install"]

_DATA: Any = torch.Tensor.data


def install() -> None:
    """Have assignments to `Parameter.data` looked at. Once per process."""
    nn.Parameter.data = property(_DATA.__get__, _set_data, _DATA.__delete__)  # type: ignore


def _set_data(parameter: nn.Parameter, value: Any) -> None:
    if type(value) is ShardTensor:
        raise ModuleError(
            message("parameter.data = x", f"x is a ShardTensor {value.sharding}, the parameter a "
                    f"plain tensor of shape {tuple(parameter.shape)}",
                    "a plain parameter's data is memory of one device", [str(value.sharding)],
                    "module.weight = nn.Parameter(x), or weft.distribute_module(module, mesh, "
                    'shardings={"weight": ...})')
        )
    _DATA.__set__(parameter, value)
