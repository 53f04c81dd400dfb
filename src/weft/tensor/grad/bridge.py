"""Where torch passes `__torch_function__` by: `autograd.Function.apply`, `autograd.backward`,
checkpointing, module backward hooks, `gradcheck` and `torch.testing`.

They would see the wrapper, which has no graph, and silently lose gradients. They are taken over,
once, at import; calls without a ShardTensor go straight on. A user's Function gets full tensors
unless it has a rule; torch's own checkpoint and module backward hooks keep the global view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch.autograd import Function
from torch.autograd.graph import (
    get_gradient_edge,
    increment_version,
    register_multi_grad_hook,
)
from torch.nn.modules._functions import BackwardHookFunction
from torch.testing._comparison import TensorLikePair
from torch.utils import dlpack
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame, checkpoint

from weft.errors import UnsupportedOpError, message
from weft.tensor.call import finish
from weft.tensor.call.dispatch import mesh_of
from weft.tensor.call.fallback import replicate, write_back
from weft.tensor.call.own.functions import OWN, is_sharded
from weft.tensor.call.own.outside import OutsideMesh
from weft.tensor.grad import autograd, tracers
from weft.tensor.grad.anomaly import nans_told
from weft.tensor.grad.hooks import register_hook_of_several
from weft.tensor.meta import Meta, replicated_meta
from weft.tensor.placing.construct import as_sharded, redistribute_to
from weft.tensor.placing.draw import torch_draws
from weft.tensor.placing.enter import share_memory
from weft.tensor.placing.foreign import taken
from weft.tensor.placing.values import global_value, like_dense
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.takeover import take_over, twin_of
from weft.tensor.torch_collectives import on_full, refusal, sends
from weft.tensor.trace.capture import map_tensors
from weft.tensor.trace.trees import flatten, local_of

__all__ = ["install", "on_full_tensors", "plain_apply"]

_apply_function: Any = Function.__dict__["apply"].__func__
_checkpoint_function: Any = checkpoint.__wrapped__  # type: ignore[attr-defined]  # below dynamo's
_warn_of_hooks: Any = torch.nn.Module._maybe_warn_non_full_backward_hook

_APPLY, _CHECKPOINT = twin_of(_apply_function), twin_of(_checkpoint_function)
_WARN_OF_HOOKS, _EDGE = twin_of(_warn_of_hooks), twin_of(get_gradient_edge)  # type: ignore
_BACKWARD: Any = twin_of(torch.autograd.backward)  # type: ignore[arg-type]
_GRAD: Any = twin_of(torch.autograd.grad)  # type: ignore[arg-type]
_INCREMENT: Any = twin_of(increment_version)  # type: ignore[arg-type]
_TO_TENSOR: Any = twin_of(TensorLikePair._to_tensor)  # type: ignore[arg-type]
_TO_DLPACK: Any = torch._C._to_dlpack  # type: ignore[attr-defined]
_SAVE_INPUTS, _INPUTS = twin_of(_CheckpointFrame.save_inputs), twin_of(_CheckpointFrame.get_inputs)


def install() -> None:
    """Route them past weft. Once per process."""
    taken: list[tuple[Any, Callable[..., Any]]] = [
        (_apply_function, _apply),
        (torch.autograd.backward, _backward),
        (torch.autograd.grad, _grad),
        (_checkpoint_function, _checkpoint),
        (_CheckpointFrame.save_inputs, _save_inputs),
        (_CheckpointFrame.get_inputs, _inputs),
        (_warn_of_hooks, _refuse_old_hooks),
        (get_gradient_edge, _refuse_edges),
        (increment_version, _increment),
        (register_multi_grad_hook, register_hook_of_several),
        (torch.autograd.gradcheck, _checked(torch.autograd.gradcheck, 1)),
        (torch.autograd.gradgradcheck, _checked(torch.autograd.gradgradcheck, 2)),
        (TensorLikePair._to_tensor, _to_tensor),
        *tracers.TAKEN,
    ]
    for function, answer in taken:
        take_over(function, answer)
    tracers.install_on_script()
    for module in (torch._C, torch, dlpack):
        name = "_to_dlpack" if module is torch._C else "to_dlpack"
        setattr(module, name, _to_dlpack)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_sharded(args, kwargs):
        return _APPLY(cls, *args, **kwargs)
    own = OWN.get(cls)
    if own is not None:
        return own(*args, **kwargs)
    if sends(cls):
        raise refusal(cls, [one.sharding for one in flatten(args) if type(one) is ShardTensor])
    if cls is BackwardHookFunction:
        return _hooked(args)
    if cls is CheckpointFunction:
        return _global_view(cls, args)
    return on_full_tensors(cls, *args, **kwargs)


def _backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    inputs = kwargs.get("inputs") or ()
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    if any(type(tensor) is ShardTensor for tensor in (*given, *inputs)):
        return autograd.backward_all(tensors, *args, **kwargs)
    with autograd.OneBackward() as running:
        with nans_told(given):
            _BACKWARD(tensors, *args, **kwargs)
        running.flush()


def _grad(*args: Any, **kwargs: Any) -> Any:
    if is_sharded(args, kwargs):
        return _GRAD(*args, **kwargs)  # comes to `autograd.grad` as a call on ShardTensors
    with autograd.OneBackward(captures=True) as running:
        with nans_told(flatten((args, kwargs))):
            found = _GRAD(*args, **kwargs)
        running.flush()
        return found


class _Tie(Function):
    """The identity, which saves a tensor.

    A checkpoint recomputes when the first saved tensor is asked for, and until the last one is
    there. Where a rank's shard is empty an op may save less than on other ranks: that must not
    decide which collectives a rank issues, or when.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x.new_empty(0))
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        _ = ctx.saved_tensors
        return grad


def _checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint without reentrance: the results are the last to save, the first to recompute."""
    if kwargs.get("use_reentrant") is not False:
        return _CHECKPOINT(function, *args, **kwargs)

    def tied(*given: Any, **named: Any) -> Any:
        def tie(one: torch.Tensor) -> torch.Tensor:
            if type(one) is not ShardTensor or not one.requires_grad or one.is_leaf:
                return one
            return wrap(_APPLY(_Tie, one._local), one._meta)

        with finish.scope():
            out = function(*given, **named)
        return map_tensors(tie, out) if torch.is_grad_enabled() else out

    return _CHECKPOINT(tied, *args, **kwargs)


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
    return like_dense(value) if type(value) is ShardTensor else _TO_TENSOR(pair, value)


def _to_dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """torch's own, in C, would hand out the address of a wrapper that has no memory."""
    return _TO_DLPACK(tensor, *args, **kwargs) if type(tensor) is not ShardTensor else (
        tensor.__dlpack__()  # which is refused
    )


def plain_apply(cls: Any) -> Callable[..., Any]:
    """`cls.apply` as torch has it, for plain tensors."""
    return partial(_APPLY, cls)


def on_full_tensors(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """A user's Function on full tensors; every rank computes the same."""
    tensors = flatten((args, kwargs))
    metas = [tensor._meta for tensor in tensors if type(tensor) is ShardTensor]
    mesh = mesh_of(f"{cls.__name__}.apply", metas)
    if mesh.here is None:
        return OutsideMesh(plain_apply(cls), mesh, None).run(cls, args, kwargs)
    tensors = [taken(tensor, mesh) for tensor in tensors]
    full = [replicate(tensor, mesh, cls.__name__) for tensor in tensors]
    if share_memory(tensors):
        full = [t if t is local_of(tensor) else t.clone() for t, tensor in zip(full, tensors)]
    before = [one._version for one in full]
    feed = iter(full)
    with torch_draws(mesh), on_full(cls.__name__):
        out = _APPLY(
            cls, *map_tensors(lambda _: next(feed), args),
            **map_tensors(lambda _: next(feed), kwargs),
        )
    given: dict[int, torch.Tensor] = {}
    for tensor, one, version in zip(tensors, full, before):
        if type(tensor) is ShardTensor and one._version != version:  # ctx.mark_dirty
            write_back(f"{cls.__name__}.apply", tensor, one, mesh)
            given[id(one)] = tensor
    return map_tensors(
        lambda one: given[id(one)] if id(one) in given else wrap(one, replicated_meta(mesh, one)),
        out,
    )


def _refuse_old_hooks(module: Any, inputs: Any, result: Any, grad_fn: Any) -> Any:
    if is_sharded(inputs, result):
        raise UnsupportedOpError(
            message(f"{type(module).__name__}.register_backward_hook", "the module's results are "
                    "ShardTensors, and such a hook sits on a node of the local graph",
                    "hooks see gradients of global shape", [type(module).__name__],
                    "module.register_full_backward_hook(hook)")
        )
    return _WARN_OF_HOOKS(module, inputs, result, grad_fn)


def _refuse_edges(tensor: torch.Tensor) -> Any:
    if type(tensor) is ShardTensor:
        raise UnsupportedOpError(
            message("get_gradient_edge(x)", f"x is a ShardTensor {tensor.sharding}",
                    "an edge belongs to the local graph and knows no layout",
                    [str(tensor.sharding)], "torch.autograd.grad(y, x), with x itself")
        )
    return _EDGE(tensor)


def _increment(tensors: Any) -> None:
    given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    _INCREMENT([local_of(tensor) for tensor in given])


def _checked(check: Any, order: int) -> Callable[..., bool]:
    """gradcheck: of the function from full tensors to full tensors, which it can perturb.

    The layouts of its ShardTensor arguments are kept.
    """
    original = twin_of(check)

    def answer(func: Any, inputs: Any, *more: Any, **options: Any) -> bool:
        given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        if not is_sharded(given, more):
            return original(func, inputs, *more, **options)
        metas = [one._meta if type(one) is ShardTensor else None for one in given]

        def laid_out(one: Any, meta: Meta | None) -> Any:
            if meta is None:
                return one
            return redistribute_to(as_sharded(one, meta.mesh), meta.layout)

        def whole(*full: Any) -> Any:
            return map_tensors(_full, func(*map(laid_out, full, metas)))

        leaves = [
            global_value(one).clone().requires_grad_(one.requires_grad)
            if type(one) is ShardTensor else one
            for one in given
        ]
        if order == 2 and more:  # grad_outputs
            more = (map_tensors(_full, more[0]), *more[1:])
        return original(whole, leaves, *more, **options)

    return answer


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if type(tensor) is ShardTensor else tensor


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
