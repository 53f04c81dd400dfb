"""Hooks of tensors: they get, and may return, gradients of global shape.

A leaf's gradient may arrive as partial values, which are reduced when the backward is over
(`tensor.leaf_gradients`). Leaves with hooks at the forward do not take part. Hooks that are
registered later are postponed until then, and so see the whole gradient once, as hooks do. Hooks of
several tensors are called when the last has its gradient, which torch counts by nodes of one graph
task. If some leaf takes part, they are called at the end of the backward instead, with what has
arrived until then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import _MultiHandle
from torch.utils.weak import TensorWeakRef

from weft.tensor.backward import Backward, running
from weft.tensor.grad.autograd import local_cotangent, wrap_cotangent
from weft.tensor.leaf_gradients import defer_hook, disable_for, is_put_off
from weft.tensor.leaves import on_shard, uses_of
from weft.tensor.shard_tensor import ShardTensor, watch_gradient, wrap

__all__ = [
    "register_hook", "register_hook_of_several", "register_post_accumulate_grad_hook",
]


def register_hook(tensor: ShardTensor, hook: Callable[[ShardTensor], Any]) -> Any:
    """A tensor hook: it gets, and may return, the gradient as a ShardTensor."""
    if tensor._gathered is not None:
        return on_shard(tensor, register_hook, hook)
    watch_gradient(tensor)
    first = tensor._meta
    # They hold the hook, so not the reverse.
    of, of_local = weakref.ref(tensor), TensorWeakRef(tensor._local)

    def local_hook(local: torch.Tensor) -> torch.Tensor | None:
        found, leaf, meta = of(), of_local(), first
        if found is not None and found._local.is_leaf:  # `x.data = ` may have laid it elsewhere
            leaf, meta = found._local, found._meta
        if leaf is not None and is_put_off(leaf):
            return defer_hook(leaf, local)
        out = hook(wrap_cotangent(meta, local))
        if out is None:
            return None
        if out.shape != meta.shape:  # torch's own words
            raise RuntimeError(f"hook '{getattr(hook, '__name__', hook)}' has changed the size of "
                               f"value: {tuple(meta.shape)} became {tuple(out.shape)}")
        return local_cotangent(meta, out)

    local_hook.given = hook  # type: ignore[attr-defined]
    disable_for(tensor._local)
    return tensor._local.register_hook(local_hook)


def register_post_accumulate_grad_hook(
    tensor: ShardTensor, hook: Callable[[ShardTensor], Any]
) -> Any:
    """A hook that runs with the tensor itself once its gradient is complete."""
    if tensor._gathered is not None:
        return on_shard(tensor, register_post_accumulate_grad_hook, hook)
    meta, of = tensor._meta, weakref.ref(tensor)  # its local tensor holds the hook

    def local_hook(local: torch.Tensor) -> Any:
        if is_put_off(local):
            return defer_hook(local, None)
        found = of()
        # torch refuses what is not None
        return hook(wrap(local, meta) if found is None else found)

    local_hook.given = hook  # type: ignore[attr-defined]
    disable_for(tensor._local)
    return tensor._local.register_post_accumulate_grad_hook(local_hook)


class _Several:
    """A hook of several tensors, called once per backward.

    Args:
        hook: the user's hook.
        count: of the tensors; None if the first gradient calls the hook, with that alone.
    """

    def __init__(self, hook: Callable[[Any], Any], count: int | None) -> None:
        self.hook, self.count = hook, count
        self.found: weakref.WeakKeyDictionary[Backward, list[Any]] = weakref.WeakKeyDictionary()

    def of(self, place: int) -> Callable[[torch.Tensor], None]:
        """The hook of one of the tensors."""
        return lambda grad: self._arrived(place, grad)

    def _arrived(self, place: int, grad: torch.Tensor) -> None:
        backward = running()
        found = self.found.get(backward)
        is_first = found is None
        if found is None:
            found = self.found[backward] = [None] * (self.count or 0)
            backward.when_over(lambda: self._over(backward))
        if self.count is not None:
            found[place] = grad
        elif is_first:
            self.hook(grad)

    def _over(self, backward: Backward) -> None:
        found = self.found.pop(backward)
        if self.count is not None:
            self.hook(found)


def register_hook_of_several(
    original: Any, tensors: Sequence[Any], fn: Any, *, mode: str = "all"
) -> Any:
    """`torch.autograd.graph.register_multi_grad_hook`."""
    if mode not in ("all", "any") or not any(
        type(tensor) is ShardTensor and uses_of(tensor._local) for tensor in tensors
    ):
        return original(tensors, fn, mode=mode)
    several = _Several(fn, len(tensors) if mode == "all" else None)
    return _MultiHandle(tuple(
        tensor.register_hook(several.of(place)) for place, tensor in enumerate(tensors)
        if mode == "all" or tensor.requires_grad
    ))
