"""`torch.optim` on local tensors: the whole update, if every parameter's tensors have one layout.

The update functions of these optimizers treat each element of a parameter, its gradient and its
state independently. So if these have the same layout, which they do unless a user moves them, a
rank updates its blocks by the very same function, for-loop, foreach or fused, without ShardTensors.
torch then neither looks for overloads in lists of 50 tensors (0.1 us per tensor, list and
signature: half of the extra time of a foreach step over plain tensors) nor wraps its temporaries.
Adafactor takes norms of whole matrices, so it is not among these; Muon is in `muon`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not
from typing import Any

import torch
from torch import is_grad_enabled
from torch.autograd.graph import increment_version

from weft.tensor.grad.autograd import wrap_cotangent
from weft.tensor.meta import Meta
from weft.tensor.modes import STRICT
from weft.tensor.placing.foreign import is_foreign
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["on_locals", "opened_lists"]

_Metas = list[Meta | None]
_Tensor = torch.Tensor
_STATE = frozenset((ShardTensor, type(None)))


def on_locals(update: Any, params: Any, *args: Any, **kwargs: Any) -> None:
    """`update`, an update function of torch.optim, which takes parameters, gradients and state as
    parallel lists."""
    opened = opened_lists((params, *args), kwargs)
    if opened is None:
        return update(params, *args, **kwargs)
    before = [list(locals_) for locals_ in opened]
    update(*opened, **kwargs)
    if kwargs.get("fused"):  # torch's fused kernels write without counting it
        increment_version([one for one in opened[0] if not one.is_inference()])
    for tensors, old, new in zip((params, *args), before, opened):
        if any(map(is_not, old, new)):
            _take_over(params, tensors, old, new)


def opened_lists(given: Sequence[Any], kwargs: dict[str, Any]) -> list[list[Any]] | None:
    """The lists of an update on local tensors, parameters first; None where it has to run on the
    ShardTensors."""
    params = given[0]
    if type(params) is not list or ShardTensor not in map(type, params):
        return None
    # A keyword may be a ShardTensor (a learning rate), or a list that may hold some.
    if is_grad_enabled() or STRICT.on or any(
        isinstance(value, (ShardTensor, list, tuple)) for value in kwargs.values()
    ):
        return None
    return _opened(given)


def _opened(given: Sequence[Any]) -> list[list[Any]] | None:
    """The lists of local tensors; None if some parameter's tensors have different layouts."""
    homes: _Metas | None = None
    known: _Metas = []
    opened = []
    for tensors in given:
        if type(tensors) is not list:
            return None
        metas: _Metas
        try:
            metas = [tensor._meta for tensor in tensors]
            opened.append([tensor._local for tensor in tensors])
            all_sharded = True
        except AttributeError:
            if any(map(is_foreign, tensors)):  # torch's own calls take both
                return None
            metas = [tensor._meta if type(tensor) is ShardTensor else None for tensor in tensors]
            opened.append([
                tensor if meta is None else tensor._local for tensor, meta in zip(tensors, metas)
            ])
            all_sharded = False
        if homes is None:
            homes = metas
        if metas != known:  # state and gradients have the same, interned, metas
            if not _lie_as(homes, metas, tensors):
                return None
            if all_sharded:
                known = metas
    return opened


def _lie_as(homes: _Metas, metas: _Metas, tensors: Sequence[Any]) -> bool:
    """Whether each tensor has the layout of its parameter, whose meta is in `homes`.

    State that a parameter does not use is an empty list, state yet to be made is None, and
    numbers (the count of steps) are plain 0-d tensors. Parameters may lie on several meshes.
    """
    if metas and len(metas) != len(homes):
        return False
    numbers = False
    for home, meta in set(zip(homes, metas)):  # a model has few kinds of parameters
        if meta is None:
            numbers |= home is not None
        elif (
            home is None or (meta.layout is not home.layout and meta.layout != home.layout)
            or meta.mesh is not home.mesh or meta.alias is not None or meta.layout.is_partial
            or home.varying  # gathered now, for its module
        ):
            return False
    return not numbers or all(
        (type(tensor) is _Tensor and not tensor.dim()) or home is None or type(tensor) in _STATE
        for home, tensor in zip(homes, tensors)
    )


def _take_over(params: Any, tensors: Any, old: Sequence[Any], new: Sequence[Any]) -> None:
    """Wrap state that the update made and put into the list, as ShardTensors."""
    for place, (param, before, local) in enumerate(zip(params, old, new)):
        if local is before:
            continue
        sharded = type(param) is ShardTensor and isinstance(local, torch.Tensor)
        tensors[place] = wrap_cotangent(param._meta, local) if sharded else local
