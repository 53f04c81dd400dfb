"""`x[index] = value` on any layout.

Integers and slices name a block: the block is a ragged view of what each rank holds already, the
value comes to its layout, and each rank writes its own part. A boolean mask is `where`. Other
indices are written on full tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.tensor.call.dispatch import mesh_of
from weft.tensor.call.fallback import runner
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.trees import flatten

__all__ = ["set_item"]


def set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """`tensor[index] = value`, as torch's, in place."""
    if type(tensor) is not ShardTensor:
        _set_by_fallback(tensor, index, value)
        return
    items = index if isinstance(index, tuple) else (index,)
    if all(item is None or item is Ellipsis or (isinstance(item, (slice, int))
           and not isinstance(item, bool)) for item in items):
        _set_block(tensor, items, value)
    elif _is_mask(tensor, index) and (not isinstance(value, torch.Tensor) or value.dim() == 0):
        if not isinstance(value, torch.Tensor):
            value = torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)
        mask: Any = index
        tensor.copy_(torch.where(mask, value, tensor))
    else:
        _set_by_fallback(tensor, index, value)


def _set_block(tensor: ShardTensor, items: tuple[Any, ...], value: Any) -> None:
    meta = torch.empty(tensor.shape, device="meta")
    shape = meta[items].shape  # raises what torch raises
    view = tensor[_as_slices(items, tensor.shape)]
    if not isinstance(value, torch.Tensor):
        view.fill_(value)
        return
    lead = value.dim() - len(shape)
    if lead > 0:  # leading dims of size 1 fall away, as in torch
        value = value.reshape(value.shape[lead:])
    view.copy_(value.expand(shape).reshape(view.shape))


def _as_slices(items: tuple[Any, ...], shape: torch.Size) -> tuple[slice, ...]:
    """The same block with every dim kept: integers as slices of length 1, no new dims."""
    named = [item for item in items if item is not None]
    count = sum(item is not Ellipsis for item in named)
    out: list[slice] = []
    for item in named:
        if item is Ellipsis:
            out += [slice(None)] * (len(shape) - count)
        elif isinstance(item, int):
            at = item % shape[len(out)]
            out.append(slice(at, at + 1))
        else:
            out.append(item)
    return tuple(out)


def _is_mask(tensor: ShardTensor, index: Any) -> bool:
    return (
        isinstance(index, torch.Tensor)
        and index.dtype == torch.bool
        and index.shape == tensor.shape
    )


def _set_by_fallback(tensor: torch.Tensor, index: Any, value: Any) -> None:
    metas = [one._meta for one in flatten((tensor, index, value)) if type(one) is ShardTensor]
    run = runner(mesh_of("__setitem__", metas), "the index is neither a block nor a mask")
    run(torch.Tensor.__setitem__, (tensor, index, value), {})
