"""torch.masked: Python code over ordinary ops, but for one question that it asks of layouts.

It looks `x.layout` up in a set of torch's, which weft's Layout, though it equals `torch.strided`,
is not found in; and it compares the layouts of tensor and mask, which need not be cut alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.masked import _ops

from weft.tensor.call.own.functions import is_sharded
from weft.tensor.takeover import twin_of
from weft.tensor.trace.trees import local_of

__all__ = ["TAKEN"]

_input_mask: Any = _ops._input_mask
_INPUT_MASK = twin_of(_input_mask)


def _as_input(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The mask, bool and of the input's shape."""
    mask = kwargs.get("mask")
    if mask is None or not is_sharded(input, mask):
        return _INPUT_MASK(local_of(input), *args, **kwargs)  # without a mask it raises
    if mask.shape != input.shape:
        mask = torch.broadcast_to(mask.clone(), input.shape)
    return mask.to(dtype=torch.bool)


TAKEN = [(_input_mask, _as_input)]
