"""`torch.vmap` over ShardTensors, mapped or closed over.

torch's own batching rules turn a call on mapped tensors into ops on what they contain, of one dim
more. What they contain may be a ShardTensor: its ops arrive below autograd, where each is carried
out as a call of its own. The local tensors record autograd's graph, as everywhere; so the keys that
torch has excluded on its way down are those of the call of `vmap` again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from weft.errors import UnsupportedOpError, message
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.trees import flatten
from weft.transport.nodes import MAPS, transforms

__all__ = ["beneath", "is_mapping", "through_torch", "vmap"]

_C: Any = torch._C


def vmap(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.vmap` of a function, called. Under another transform ShardTensors stay refused."""
    if transforms() is not None:
        return original(*args, **kwargs)
    before = MAPS.keys
    MAPS.keys = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    try:
        return original(*args, **kwargs)
    finally:
        MAPS.keys = before


def is_mapping() -> bool:
    """Whether a mapped function runs in this thread."""
    return MAPS.keys is not None and transforms() is not None


def through_torch(func: Any, args: Any, kwargs: Any) -> Any:
    """A call of a mapped function on ShardTensors and others: torch's batching rules see it."""
    with _C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def beneath(func: Any, args: Any, kwargs: Any) -> Any:
    """An op that a batching rule consists of; NotImplemented if there is no vmap, or tangents."""
    if MAPS.keys is None or forward_ad._current_level >= 0:
        return NotImplemented
    plain = [one for one in flatten((args, kwargs)) if type(one) is not ShardTensor]
    if torch.is_grad_enabled() and any(one.requires_grad for one in plain):
        raise _of_plain_gradient(func, plain)
    with _C._ForceDispatchKeyGuard(*MAPS.keys):
        return ShardTensor.__torch_function__(func, (), args, kwargs or {})


def _of_plain_gradient(func: Any, plain: list[Tensor]) -> UnsupportedOpError:
    offenders = [f"shape {tuple(one.shape)}" for one in plain if one.requires_grad]
    return UnsupportedOpError(
        message("vmap", f"{func} meets a ShardTensor and {len(offenders)} plain tensors that "
                "require grad", "under vmap torch would record a graph of the wrapper, which has "
                "none", offenders,
                "weft.distribute_tensor(x, mesh, P()), of the plain tensors, before vmap"))
