"""`apply_`, `map_`, `map2_`: a Python function of each element, in place.

torch runs them in C on the memory of a tensor; here on that of each rank's block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.tensor.placing.layouts import as_sharded
from weft.tensor.placing.redistribute import redistribute_to
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.trace.trees import local_of

__all__ = ["by_element"]


def by_element(name: str) -> Callable[..., Any]:
    """The method of this name; its last argument is the function."""
    method = getattr(torch.Tensor, name)

    def run(tensor: Any, *given: Any) -> Any:
        *others, function = given
        if type(tensor) is not ShardTensor:  # a plain target: the values as they are everywhere
            whole = [one.full_tensor() if type(one) is ShardTensor else one for one in others]
            return method(tensor, *whole, function)
        meta = tensor._meta
        layout = meta.layout.replace(partial=(None,) * meta.mesh.ndim)
        if any(one.requires_grad for one in (tensor, *others)):
            method(local_of(tensor), *map(local_of, others), function)  # torch's refusal
        with torch.no_grad():
            shape = tensor.shape
            laid = [redistribute_to(as_sharded(one.expand(shape), meta.mesh), layout)
                    for one in others]
            value = redistribute_to(tensor, layout)
            local = local_of(value).clone()
            method(local, *[local_of(one) for one in laid], function)
            return tensor.copy_(wrap(local, value._meta))

    return run
