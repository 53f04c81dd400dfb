"""Layers of torch whose Python code needs what a ShardTensor lacks: a local batch, an address.

SyncBatchNorm of a ShardTensor is batch_norm, whose statistics are already those of the global
batch. torch's own would gather them over a process group, as if each rank had a batch of its own,
and only on GPUs. Recurrent networks put their weights into one block of memory on a GPU;
ShardTensors stay where they are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.tensor import ShardTensor

__all__ = ["flatten_parameters", "sync_batch_norm"]


def sync_batch_norm(original: Any, module: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    """The forward of `nn.SyncBatchNorm`."""
    if type(input) is not ShardTensor:
        return original(module, input)
    module._check_non_zero_input_channels(input)
    return _BatchNorm.forward(module, input)


def flatten_parameters(original: Any, module: nn.RNNBase) -> None:
    if not any(type(weight) is ShardTensor for weight in module._flat_weights):
        original(module)
