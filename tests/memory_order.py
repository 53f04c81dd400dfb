"""What a ShardTensor says of its order in memory, compared with its local tensor.

`watch` has every ShardTensor that comes to be looked at, whatever makes it: the attribute `_meta`
is the last that it gets. A mode of torch's would see results alone, and switch off the short route.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from weft import ShardTensor

_PLAIN = (Tensor, Parameter)

Strides = tuple[int, ...]


class WrongOrder(AssertionError):
    """A ShardTensor says what is not true of its local tensor."""


def disagreement(
    shape: Strides, claimed: Strides, local: Tensor, sharded: Collection[int] = ()
) -> str | None:
    """What a global tensor of this shape and these strides allows, and the local one does not.

    Where the global dims lie without gaps, the local ones do, in the same order. Elsewhere, dims
    that a view may join can be joined in the local tensor, too. Dims of one element say nothing.
    No view joins shards of an inner dim: every other element of a line of 3 lies as of one of 4,
    but what follows the last is shorter by less than a step.
    """
    lengths, strides = tuple(local.shape), local.stride()
    if len(lengths) != len(shape) or 0 in lengths:
        return None  # it holds nothing
    dims = sorted((dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda d: -claimed[d])
    there = [dim for dim in dims if lengths[dim] > 1]
    step = 1
    for dim in reversed(dims):
        if claimed[dim] != step:
            break
        step *= shape[dim]
    else:
        step = 1
        for dim in reversed(there):
            if strides[dim] != step:
                return f"{shape} with strides {claimed} has no gaps, but {lengths} has {strides}"
            step *= lengths[dim]
        return None
    for outer, inner in pairwise(there):
        between = dims[dims.index(outer) : dims.index(inner) + 1]
        is_cut = any(dim in sharded for dim in between[1:])
        if all(claimed[a] == shape[b] * claimed[b] for a, b in pairwise(between)) and (
            abs(strides[outer] - lengths[inner] * strides[inner])
            >= (max(strides[inner], 1) if is_cut else 1)
        ):
            return (f"dims {outer} and {inner} of {shape} with strides {claimed} can be joined, "
                    f"those of {lengths} with {strides} cannot")
        if claimed[outer] > claimed[inner] > 0 and 0 < strides[outer] < strides[inner]:
            return f"{shape} with strides {claimed} has another order than {lengths} with {strides}"
    return None


def _set(self: ShardTensor, name: str, value: Any) -> None:
    object.__setattr__(self, name, value)
    if name == "_meta":
        local = self._local
        if type(local) not in _PLAIN:  # of a moved view, the tensor in the graph
            local = getattr(local, "_weft_plain", None)
            if local is None:  # it is on its way
                return
        if value.strides is None and local.is_contiguous():
            return
        sharded = [dim for dim, axes in enumerate(value.layout.dims) if axes]
        found = disagreement(tuple(value.shape), value.stride(), local, sharded)
        if found is not None:
            raise WrongOrder(f"{value.layout}: {found}")


def watch() -> None:
    """Look at every ShardTensor of this process from now on."""
    ShardTensor.__setattr__ = _set  # type: ignore[method-assign]


@contextmanager
def unwatched() -> Iterator[None]:
    """Look at none inside."""
    del ShardTensor.__setattr__
    try:
        yield
    finally:
        watch()
