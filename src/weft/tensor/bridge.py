"""Where torch passes `__torch_function__` by: `autograd.Function.apply`, `autograd.backward`,
the inputs that checkpointing saves, and `torch.testing`.

They would see the wrapper, which has no graph, and silently lose gradients. They are replaced,
once, at import; calls without a ShardTensor go straight on. A user's Function gets full tensors;
torch's own checkpoint and module backward hooks keep the global view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import Function
from torch.nn.modules._functions import BackwardHookFunction
from torch.testing._comparison import TensorLikePair
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

from weft.errors import UnsupportedOpError, message
from weft.tensor import autograd
from weft.tensor.capture import map_tensors
from weft.tensor.dispatch import mesh_of
from weft.tensor.fallback import replicate
from weft.tensor.meta import Meta, replicated_meta
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.trees import flatten, local_of
from weft.tensor.values import global_value

__all__ = ["install"]

_APPLY = Function.__dict__["apply"].__func__
_BACKWARD = torch.autograd.backward
_TO_TENSOR = TensorLikePair._to_tensor
_SAVE_INPUTS, _INPUTS = _CheckpointFrame.save_inputs, _CheckpointFrame.get_inputs


def install() -> None:
    """Route them past weft. Idempotent."""
    Function.apply = classmethod(_apply)  # type: ignore[assignment]
    torch.autograd.backward = _backward
    _CheckpointFrame.save_inputs = _save_inputs  # type: ignore[method-assign]
    _CheckpointFrame.get_inputs = _inputs  # type: ignore[method-assign]
    TensorLikePair._to_tensor = _to_tensor  # type: ignore[method-assign]


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if not any(type(tensor) is ShardTensor for tensor in flatten((args, kwargs))):
        return _APPLY(cls, *args, **kwargs)
    if cls is BackwardHookFunction:
        return _hooked(args)
    if cls is CheckpointFunction:
        return _global_view(cls, args)
    return _on_full_tensors(cls, args, kwargs)


def _backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    inputs = kwargs.get("inputs") or ()
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    if any(type(tensor) is ShardTensor for tensor in (*given, *inputs)):
        return autograd.backward_all(tensors, *args, **kwargs)
    with autograd.OneBackward():
        _BACKWARD(tensors, *args, **kwargs)


def _save_inputs(frame: Any, *args: Any) -> None:
    """Checkpoint without reentrance: what is saved are the local tensors, with their graph."""
    frame.metas = [arg._meta if type(arg) is ShardTensor else None for arg in args]
    _SAVE_INPUTS(frame, *map(local_of, args))


def _inputs(frame: Any) -> list[Any]:
    return [
        arg if meta is None else wrap(arg, meta.replace(requires_grad=arg.requires_grad))
        for arg, meta in zip(_INPUTS(frame), frame.metas)
    ]


def _to_tensor(pair: Any, value: Any) -> torch.Tensor:
    """`torch.testing.assert_close` compares global values."""
    return global_value(value) if type(value) is ShardTensor else _TO_TENSOR(pair, value)


def _on_full_tensors(cls: Any, args: Any, kwargs: Any) -> Any:
    """A user's Function on full tensors; every rank computes the same."""
    tensors = flatten((args, kwargs))
    metas = [tensor._meta for tensor in tensors if type(tensor) is ShardTensor]
    mesh = mesh_of(f"{cls.__name__}.apply", metas)
    full = [replicate(tensor, mesh, cls.__name__) for tensor in tensors]
    before = [one._version for one in full]
    feed = iter(full)
    out = _APPLY(
        cls, *map_tensors(lambda _: next(feed), args),
        **map_tensors(lambda _: next(feed), kwargs),
    )
    changed = [
        index for index, (tensor, one) in enumerate(zip(tensors, full))
        if type(tensor) is ShardTensor and one._version != before[index]
    ]
    if changed:
        raise UnsupportedOpError(
            message(f"{cls.__name__}.apply", f"it changed {len(changed)} of its arguments in place",
                    "a Function without a rule gets gathered copies, which it must not write to",
                    [f"tensor argument {index}" for index in changed],
                    "return a new tensor instead")
        )
    return map_tensors(lambda one: wrap(one, replicated_meta(mesh, one)), out)


def _wrapped(grads: Any, metas: Sequence[Meta | None]) -> tuple[Any, ...]:
    """The gradients as the user sees them, one per meta (None: of a plain tensor)."""
    return tuple(
        grad if grad is None or meta is None else autograd.wrap_cotangent(meta, grad)
        for grad, meta in zip(grads, metas)
    )


class _HookNode:
    """A grad_fn whose hooks see the gradients of all its tensors as ShardTensors."""

    def __init__(self, node: Any, metas: Sequence[Meta | None]) -> None:
        self._node, self._metas = node, metas

    def name(self) -> str:
        return self._node.name()

    def register_prehook(self, hook: Any) -> Any:
        return self._node.register_prehook(lambda grads: self._local(hook(self._wrap(grads))))

    def register_hook(self, hook: Any) -> Any:
        return self._node.register_hook(
            lambda inputs, outputs: self._local(hook(self._wrap(inputs), self._wrap(outputs)))
        )

    def _wrap(self, grads: Any) -> tuple[Any, ...]:
        return _wrapped(grads, self._metas)

    def _local(self, grads: Any) -> Any:
        if grads is None:
            return None
        return tuple(
            grad if grad is None or meta is None else autograd.local_cotangent(meta, grad)
            for grad, meta in zip(grads, self._metas)
        )


def _hooked(args: Any) -> Any:
    """Module backward hooks: the identity on local tensors, hooks in the global view."""
    outs = _APPLY(BackwardHookFunction, *map(local_of, args))
    outs = outs if isinstance(outs, tuple) else (outs,)
    metas = [arg._meta if type(arg) is ShardTensor else None for arg in args]
    wrapped = []
    for out, meta in zip(outs, metas):
        if meta is None:
            wrapped.append(out)
            continue
        tensor = wrap(out, meta.replace(requires_grad=out.requires_grad))
        if out.grad_fn is not None:
            tensor._node = _HookNode(out.grad_fn, metas)
        wrapped.append(tensor)
    return tuple(wrapped)


class _Context:
    """What a Function's forward and backward see of their node, in the global view."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_dirty(self, *tensors: Any) -> NoReturn:
        raise UnsupportedOpError(
            message("ctx.mark_dirty", f"{len(tensors)} ShardTensors are marked as changed",
                    "a Function in the global view returns new tensors", [], "x.clone() first")
        )


class _GlobalView(Function):
    """Runs another Function's forward and backward on ShardTensors."""

    @staticmethod
    def forward(ctx: Any, cls: Any, args: Any, seen: dict[str, Any], *locals_: Any) -> Any:
        ctx.cls, ctx.args = cls, args
        ctx.user = _Context(tuple(
            isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args
        ))
        out = cls.forward(ctx.user, *args)
        seen["single"] = isinstance(out, torch.Tensor)
        outs = (out,) if seen["single"] else tuple(out)
        ctx.metas = seen["metas"] = [
            one._meta if type(one) is ShardTensor else None for one in outs
        ]
        return tuple(local_of(one) if isinstance(one, torch.Tensor) else one for one in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wrapped = _wrapped(grads, ctx.metas)
        back = ctx.cls.backward(ctx.user, *wrapped)
        back = back if isinstance(back, tuple) else (back,)
        found = []
        for arg, grad in zip(ctx.args, back):
            if not isinstance(arg, torch.Tensor):
                continue
            if grad is not None and type(arg) is ShardTensor:
                grad = autograd.local_cotangent(arg._meta, grad)
            found.append(None if grad is None else local_of(grad))
        return (None, None, None, *found)


def _global_view(cls: Any, args: Any) -> Any:
    seen: dict[str, Any] = {}
    locals_ = [local_of(arg) for arg in args if isinstance(arg, torch.Tensor)]
    outs = _APPLY(_GlobalView, cls, args, seen, *locals_)
    wrapped = tuple(
        out if meta is None else wrap(out, meta.replace(requires_grad=out.requires_grad))
        for out, meta in zip(outs, seen["metas"])
    )
    return wrapped[0] if seen["single"] else wrapped
