"""`torch.func` over ShardTensors: vmap, grad, vjp, jvp, and their compositions (jacrev, jacfwd,
hessian).

torch's transforms wrap tensors, and turn a call on wrapped tensors into ops on the tensors inside.
These may be ShardTensors: then the ops arrive below autograd, where each is carried out as a call
of its own (`beneath`). The local tensors record autograd's graph, as everywhere. So the dispatch
keys that torch has excluded on its way down are set back to those around the outermost transform.

Under grad, torch would wrap the local tensors of ShardTensors that a function closes over, too. So
calls on these alone run as if there were no transform (`_Closures`). Forward AD has one state for
all simulated ranks: `jvp` of ShardTensors is the transpose of the transpose instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from weft.core.scopes import setting
from weft.errors import UnsupportedOpError
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.trees import flatten
from weft.transport.nodes import (
    MAPS,
    contained,
    is_wrapped,
    keys_around_maps,
    outside_maps,
    transforms,
)

__all__ = ["beneath", "differentiated", "is_mapping", "jvp", "through_torch", "vjp", "vmap"]

_C: Any = torch._C


@contextmanager
def _outermost(*given: Any) -> Iterator[None]:
    """Keep the keys around the outermost transform. Under one of torch's own, that refuses
    ShardTensors (functionalize), nothing is kept.

    Gradients of writes through views repeat the views: the wrappers of ShardTensors know no offset
    into their base. Attention on ShardTensors is made of products, which torch maps and weft
    shards; of the fused kernels' gradients neither knows a thing."""
    if transforms() is not None or MAPS.keys is not None:
        yield
        return
    MAPS.keys = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    is_sharded = any(type(one) is ShardTensor for one in flatten(given))
    try:
        with _force_original_view_tracking(True), (
            sdpa_kernel(SDPBackend.MATH) if is_sharded else nullcontext()
        ):
            yield
    finally:
        MAPS.keys = None


def vmap(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.vmap` of a function, called."""
    with _outermost(args, kwargs):
        return original(*args, **kwargs)


def differentiated(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.func.grad` of a function, or a part of `vjp`, called."""
    with _outermost(args, kwargs):
        if MAPS.keys is None:
            return original(*args, **kwargs)
        with _Closures():
            return original(*args, **kwargs)


def vjp(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.func.vjp`, whose second result runs after the transform has ended."""
    out, pull, *aux = differentiated(original, *args, **kwargs)

    def pulled(*args: Any, **kwargs: Any) -> Any:
        return differentiated(pull, *args, **kwargs)

    return out, pulled, *aux


def jvp(
    original: Any, func: Callable[..., Any], primals: Any, tangents: Any, argnums: Any, *,
    strict: bool = False, has_aux: bool = False,
) -> Any:
    """`torch.func.jvp`: of ShardTensors by two transpositions, which takes about three forwards.

    Its second result is linear in the cotangent, so the tangent is what that one pulls back. With
    `strict`, tangents of results that depend on no input are zeros all the same. A function that
    turns out to close over ShardTensors begins anew.
    """
    if not any(type(contained(one)) is ShardTensor for one in flatten((primals, tangents))):
        with temporarily_clear_interpreter_stack():
            drawn = torch.get_rng_state()
        try:
            with _Tangents(), setting(MAPS, met=_MetShards):
                return original(func, primals, tangents, argnums, strict=strict, has_aux=has_aux)
        except _MetShards:
            with temporarily_clear_interpreter_stack():
                torch.set_rng_state(drawn)
    made: Any = eager_transforms._vjp_with_argnums
    places = (argnums,) if isinstance(argnums, int) else argnums
    out, pull, *aux = made(func, *primals, argnums=places, has_aux=has_aux)
    _, push = made(pull, tree_map_only(Tensor, torch.zeros_like, out))
    return out, push(tangents)[0], *aux


class _MetShards(Exception):
    """A tensor that has a tangent met a ShardTensor."""


class _Tangents(TorchFunctionMode):
    """Calls of wrapped tensors and ShardTensors end the function."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = flatten((args, kwargs))
        if any(type(one) is ShardTensor for one in given) and any(map(is_wrapped, given)):
            raise _MetShards
        return func(*args, **(kwargs or {}))


class _Closures(TorchFunctionMode):
    """Calls on ShardTensors that no transform has wrapped run outside of all transforms."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = flatten((args, kwargs))
        if any(map(is_wrapped, given)):
            return through_torch(func, args, kwargs)
        if any(type(one) is ShardTensor for one in given):
            with outside_maps():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def is_mapping() -> bool:
    """Whether a transformed function runs in this thread."""
    return MAPS.keys is not None and transforms() is not None


def through_torch(func: Any, args: Any, kwargs: Any) -> Any:
    """A call of a transformed function on ShardTensors and others: torch's own rules see it."""
    with _C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def beneath(func: Any, args: Any, kwargs: Any) -> Any:
    """An op that torch's rule of a call consists of; NotImplemented without a transform, or with
    tangents."""
    if MAPS.keys is None or forward_ad._current_level >= 0:
        return NotImplemented
    plain = [one for one in flatten((args, kwargs)) if type(one) is not ShardTensor]
    if torch.is_grad_enabled() and any(one.requires_grad for one in plain):
        raise _of_plain_gradient(func, plain)
    given = dict(kwargs or {})
    if any(one.device == given.get("device") for one in flatten(args) if type(one) is ShardTensor):
        del given["device"]  # torch's rules name the device where they cast
    with keys_around_maps(), _C._EnableTorchFunction():
        return ShardTensor.__torch_function__(func, (), args, given)


def _of_plain_gradient(func: Any, plain: list[Tensor]) -> UnsupportedOpError:
    offenders = [f"shape {tuple(one.shape)}" for one in plain if one.requires_grad]
    return UnsupportedOpError(
        "torch.func", f"{func} meets a ShardTensor and {len(offenders)} plain tensors that "
        "require grad", "under a transform torch would record a graph of the wrapper, "
        "which has none", offenders, "weft.distribute_tensor(x, mesh, P()), of the plain "
        "tensors, before the transform")
