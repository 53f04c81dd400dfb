"""Layers of torch whose Python asks what a ShardTensor has not: a batch of its own, an address.

SyncBatchNorm of a ShardTensor is batch_norm, whose statistics are of the global batch already.
torch's own would gather them over a process group, as if each rank had a batch of its own, and on
GPUs alone. Recurrent networks put their weights into one piece of memory on a GPU; blocks of
weights stay where they are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.tensor import ShardTensor
from weft.tensor.takeover import take_over, twin_of

__all__ = ["install"]

_FORWARD: Any = twin_of(nn.SyncBatchNorm.forward)  # type: ignore[arg-type]
_FLATTEN: Any = twin_of(nn.RNNBase.flatten_parameters)  # type: ignore[arg-type]


def install() -> None:
    """Take them over. Once per process."""
    take_over(nn.SyncBatchNorm.forward, _forward)  # type: ignore[arg-type]
    take_over(nn.RNNBase.flatten_parameters, _flatten)  # type: ignore[arg-type]


def _forward(module: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    if type(input) is not ShardTensor:
        return _FORWARD(module, input)
    module._check_non_zero_input_channels(input)
    return _BatchNorm.forward(module, input)


def _flatten(module: nn.RNNBase) -> None:
    if not any(type(weight) is ShardTensor for weight in module._flat_weights):
        _FLATTEN(module)
