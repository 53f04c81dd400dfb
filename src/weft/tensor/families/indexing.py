"""`x[index]` and `x[index] = value` on any layout.

Integers and slices name a block, which is a ragged view of each rank's elements. Lists are tensors
of numbers. A mask alone selects on the ranks that hold the elements (`masks`). A mask among other
indices counts as the indices of its true elements. Values written at integers go to the ranks that
hold these places (`ops.write`). Other indices (a bool among them) run on full tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops.indexing.rows import named_dims
from weft.ops.writes import check_values
from weft.rules import op, page
from weft.tensor.call.dispatch import mesh_of
from weft.tensor.call.fallback import FIX, runner
from weft.tensor.families import masks
from weft.tensor.members import hooks
from weft.tensor.meta import expanded_dims
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.trace.capture import shape_at
from weft.tensor.trace.trees import flatten
from weft.tensor.views.inverse import OVERLAP
from weft.tensor.views.moved import unwrap_view

__all__ = ["PAGE"]


def _get_item(tensor: Tensor, index: Any) -> Any:
    """What integers, slices and tensors of numbers name is recorded; lists of numbers and masks are
    taken as they are at each call."""
    if type(tensor) is not ShardTensor and not any(
        type(one) is ShardTensor for one in flatten(index)
    ):
        return NotImplemented  # so torch's own is recorded
    items = _as_items(tensor, index)
    found = _only_mask(tensor, items)
    if found is not None:
        return masks.select(tensor, *found)
    named = _without_masks(items)
    if named is None or _is_same(named, index):
        return _by_fallback(torch.Tensor.__getitem__, tensor, index)
    return tensor[tuple(named)]


def _set_item(tensor: Tensor, index: Any, value: Any) -> None:
    """A write to a block, or to the ranks that hold the places that indices and masks name."""
    if type(tensor) is not ShardTensor:
        _by_fallback(torch.Tensor.__setitem__, tensor, index, value,
                     reason=_INTO_PLAIN, fix=_FIX_PLAIN)
        return
    items = _as_items(tensor, index)
    if all(map(_is_basic, items)):
        _set_block(tensor, tuple(items), value)
        return
    found = _only_mask(tensor, items)
    if found is not None:
        masks.put(tensor, *found, _as_tensor(value, tensor))
        return
    named = _without_masks(items)
    if named is None:
        _by_fallback(torch.Tensor.__setitem__, tensor, index, value)
        return
    value = _as_tensor(value, tensor)
    fills = value.numel() == 1 and all(_is_mask(one) for one in items if isinstance(one, Tensor))
    if fills and (tensor.is_complex() or not value.is_complex()):
        value = value.to(tensor.dtype)  # masks are filled with one element of any dtype
    _set_at(tensor, named, value)


# Indices.


def _as_items(tensor: Tensor, index: Any) -> list[Any]:
    """The parts of an index; lists and arrays of numbers as tensors, bytes as bools, and single
    integers as numbers, which torch reads from a tensor, too."""
    items = list(index) if _is_several(index) else [index]
    for at, item in enumerate(items):
        if not isinstance(item, Tensor) and (
            isinstance(item, (list, tuple, range)) or hasattr(item, "__array_interface__")
        ):
            item = torch.as_tensor(item, device=tensor.device)
            items[at] = item.to(torch.int64) if item.numel() == 0 else item
        if isinstance(item, slice):
            ends = (item.start, item.stop, item.step)
            if any(isinstance(end, Tensor) for end in ends):  # they are read, as by `index()`
                items[at] = slice(*[
                    operator.index(end) if isinstance(end, Tensor) else end for end in ends
                ])
        if isinstance(item, Tensor) and item.dtype is torch.uint8:
            items[at] = item.to(torch.bool)
        elif isinstance(item, Tensor) and not item.dim() and not (
            item.dtype is torch.bool or item.is_floating_point() or item.is_complex()
        ):
            items[at] = int(item)
    return items


def _is_several(index: Any) -> bool:
    """Whether torch reads an index as a tuple: a short list does for one, of more than numbers."""
    if isinstance(index, tuple):
        return True
    return isinstance(index, list) and len(index) < 32 and any(
        item is None or item is Ellipsis or isinstance(item, (Tensor, slice, Sequence))
        or (hasattr(item, "__array_interface__") and item.ndim > 0)
        for item in index
    )


def _is_basic(item: Any) -> bool:
    return item is None or item is Ellipsis or (
        isinstance(item, (slice, int)) and not isinstance(item, bool)
    )


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype is torch.bool


def _num_dims(item: Any) -> int:
    """How many dims of the tensor an item stands for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if _is_mask(item) else 1


def _only_mask(tensor: Tensor, items: Sequence[Any]) -> tuple[Tensor, int] | None:
    """The mask of `x[:, mask]` and the number of dims in front of it, if that is all there is."""
    found: tuple[Tensor, int] | None = None
    at = 0
    for item in items:
        if _is_mask(item) and item.dim():
            if found is not None:
                return None
            found = item, at
        elif not (item is Ellipsis or (isinstance(item, slice) and item == slice(None))):
            return None
        if item is Ellipsis:
            at += tensor.dim() - sum(map(_num_dims, items))
        at += _num_dims(item)
    return found


def _without_masks(items: Sequence[Any]) -> list[Any] | None:
    """The items, each mask replaced by the indices of what is true in it; None where an item is
    none that could be."""
    out: list[Any] = []
    for item in items:
        if _is_mask(item) and item.dim():
            out += item.nonzero(as_tuple=True)
        elif isinstance(item, bool) or _is_mask(item):
            return None
        else:
            out.append(item)
    return out


def _is_same(items: Sequence[Any], index: Any) -> bool:
    given = list(index) if isinstance(index, tuple) else [index]
    return len(given) == len(items) and all(one is other for one, other in zip(items, given))


# Writes.


def _as_tensor(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def _set_block(tensor: Any, items: tuple[Any, ...], value: Any) -> None:
    shape = shape_at(tensor.shape, items)
    view = tensor[_as_slices(items, tensor.shape)]
    if not isinstance(value, Tensor):
        if view.numel() and expanded_dims(view):
            raise RuntimeError(OVERLAP)  # torch copies the number, which fills do not ask about
        view.fill_(value)
        return
    lead = value.dim() - len(shape)
    if lead > 0:  # leading dims of size 1 fall away, as in torch
        value = value.reshape(value.shape[lead:])
    view.copy_(_apart(value.expand(shape).reshape(view.shape), view))


def _apart(value: Tensor, view: Tensor) -> Tensor:
    """The value, in memory of its own: `x[:, 3] += 1` ends with a write of what is there already.

    If a shard has one row, strides along it may differ, which torch takes for overlapping memory. A
    copy of a rank's own block changes nothing for others. A rank that left out the write, which
    counts and may have to reach the base of `view`, would no longer agree with them.
    """
    if type(view) is not ShardTensor or type(value) is not ShardTensor:
        return value
    one, other = unwrap_view(value._local), unwrap_view(view._local)
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return value
    return wrap(one.clone(), value._meta)


def _as_slices(items: tuple[Any, ...], shape: torch.Size) -> tuple[slice, ...]:
    """The same block with every dim kept: integers as slices of length 1, no new dims."""
    out: list[slice] = []
    for item in _spelled_out(items, len(shape)):
        if isinstance(item, int):
            at = item % shape[len(out)]
            out.append(slice(at, at + 1))
        elif item is not None:
            out.append(item)
    return tuple(out)


def _set_at(tensor: Any, items: Sequence[Any], value: Tensor) -> None:
    """A write at integers: slices and new dims are views, single integers indices as others."""
    shape = shape_at(tensor.shape, tuple([
        torch.empty(item.shape, dtype=torch.int64, device="meta")
        if isinstance(item, Tensor) else item for item in items
    ]))
    lead = value.dim() - len(shape)
    if lead > 0:
        value = value.reshape(value.shape[lead:])
    check_values(value.shape, shape)
    view, given = tensor, _spelled_out(items, tensor.dim())
    indices: list[Any] = []
    for dim, item in enumerate(given):
        if item is None:
            view = view.unsqueeze(dim)
        elif isinstance(item, slice):
            view = view[(*(slice(None) for _ in range(dim)), item)]
        elif not isinstance(item, Tensor):
            item = torch.tensor(int(item), device=tensor.device)
        indices.append(item if isinstance(item, Tensor) else None)
    if value.dim():
        value = value.expand(shape)
        _, before = named_dims([index for item, index in zip(given, indices)
                                if item is None or isinstance(item, (slice, Tensor))])
        _, after = named_dims(indices)
        if before != after:  # new dims stand elsewhere when integers count as indices
            new = range(len(shape) - view.dim() + sum(index is not None for index in indices))
            value = value.movedim(
                tuple([before + dim for dim in new]), tuple([after + dim for dim in new]))
    hooks.call(torch.ops.aten.index_put_.default, (view, indices, value), {})


def _spelled_out(items: Sequence[Any], ndim: int) -> list[Any]:
    """The items, with slices of all in place of an ellipsis."""
    out: list[Any] = []
    for item in items:
        if item is Ellipsis:
            out += [slice(None)] * (ndim - sum(map(_num_dims, items)))
        else:
            out.append(item)
    return out


_NEITHER = "the index is neither a block nor a mask"
_INTO_PLAIN = "it writes to a plain tensor, which holds every element on every rank"
_FIX_PLAIN = ("a sharded target: torch.zeros_like(x), x.new_empty(...), torch.stack([x, ...])\n"
              "with weft.sharded_factories(): around code that makes the target itself")


def _by_fallback(function: Any, *args: Any, reason: str = _NEITHER, fix: str = FIX) -> Any:
    metas = [one._meta for one in flatten(args) if type(one) is ShardTensor]
    run = runner(mesh_of(function.__name__, metas), reason, fix=fix)
    return run(function, args, {})


PAGE = page(
    op("torch.Tensor.__getitem__", compose=_get_item),
    op("torch.Tensor.__setitem__", compose=_set_item, each_call=True),
)
