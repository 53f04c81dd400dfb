"""The functions of torch.distributed that send tensors: they refuse ShardTensors.

Functions that send Python values (`all_gather_object` and its kin) stay: they pickle a ShardTensor
as a rank's block.
"""

from __future__ import annotations

from typing import Any

from weft.errors import UnsupportedOpError
from weft.tensor import ShardTensor
from weft.tensor.torch_collectives import function_of, is_global, refusal, refusal_of_plain
from weft.tensor.trace.trees import flatten

__all__ = ["refuse"]


def refuse(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `original`, a function of torch.distributed; UnsupportedOpError if a tensor holds a
    global value."""
    for tensor in flatten((args, kwargs)):
        if type(tensor) is ShardTensor or is_global(tensor) or function_of() is not None:
            raise _refused(original, args, kwargs)
    return original(*args, **kwargs)


def _refused(original: Any, args: Any, kwargs: Any) -> UnsupportedOpError:
    tensors = flatten((args, kwargs))
    found = [tensor.sharding for tensor in tensors if type(tensor) is ShardTensor]
    if found:
        return refusal(original, found)
    return refusal_of_plain(original, next(filter(is_global, tensors), tensors[0]))
