"""The functions of torch.distributed that send tensors look for ShardTensors first, and refuse.

What sends Python values (`all_gather_object` and its kin) stays: a ShardTensor among these is
pickled as a rank's block.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.distributed as dist

from weft.errors import UnsupportedOpError
from weft.tensor import ShardTensor
from weft.tensor.takeover import take_over, twin_of
from weft.tensor.torch_collectives import function_of, is_global, refusal, refusal_of_plain
from weft.tensor.trace.trees import flatten

__all__ = ["install"]

_NAMES = (
    "_all_gather_base", "_reduce_scatter_base", "all_gather", "all_gather_coalesced",
    "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_reduce_coalesced",
    "all_to_all", "all_to_all_single", "broadcast", "gather", "irecv", "isend", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "send",
)


def install() -> None:
    """Take them over, as far as this torch has them. Once per process."""
    if not dist.is_available():
        return
    for name in _NAMES:
        function = getattr(dist, name, None) or getattr(dist.distributed_c10d, name, None)
        if function is not None:
            take_over(function, _looking(name, twin_of(function)))


def _looking(name: str, original: FunctionType) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        for tensor in flatten((args, kwargs)):
            if type(tensor) is ShardTensor or is_global(tensor) or function_of() is not None:
                raise _refused(original, args, kwargs)
        return original(*args, **kwargs)

    return answer


def _refused(original: FunctionType, args: Any, kwargs: Any) -> UnsupportedOpError:
    tensors = flatten((args, kwargs))
    found = [tensor.sharding for tensor in tensors if type(tensor) is ShardTensor]
    if found:
        return refusal(original, found)
    return refusal_of_plain(original, next(filter(is_global, tensors), tensors[0]))
