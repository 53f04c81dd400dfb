"""Replacements for parts of torch's autograd: `Function.apply`, `autograd.backward` and `grad`,
module backward hooks.

torch's own would see the wrapper, which has no graph, and silently lose gradients (`weft.patches`
gives a reason for each). A user's Function without a rule gets full tensors, unless it consists of
torch's operations: then it keeps the global view, as torch's own checkpoint does. So does one that
uses ShardTensors beside its arguments, as solvers by adjoints and reversible layers use those of a
module: its forward stops at the first such use, and begins again.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.autograd import Function
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.checkpoint import CheckpointFunction

from weft.core import P
from weft.tensor.call import fallback
from weft.tensor.call.dispatch import mesh_of
from weft.tensor.call.func_transforms import is_mapping, through_torch
from weft.tensor.call.own.functions import OWN, is_sharded
from weft.tensor.call.own.outside import OutsideMesh
from weft.tensor.grad import autograd
from weft.tensor.grad.torch_code import is_torch_code
from weft.tensor.meta import Meta
from weft.tensor.modes import STRICT
from weft.tensor.placing.foreign import taken
from weft.tensor.placing.freed import filled, watch
from weft.tensor.placing.left_whole import tell
from weft.tensor.placing.operands import as_value
from weft.tensor.placing.redistribute import redistribute_to
from weft.tensor.placing.values import like_dense
from weft.tensor.shard_tensor import ShardTensor, now_requires_grad, wrap
from weft.tensor.takeover import class_method_of
from weft.tensor.torch_collectives import Mixing, on_full, refusal, sends
from weft.tensor.trace.trees import flatten, local_of, map_tensors
from weft.transport.nodes import outside_maps

__all__ = [
    "OP_BY_OP", "apply", "backward", "grad", "increment_version", "on_full_tensors", "plain_apply",
    "to_dlpack", "to_tensor",
]

_APPLY = class_method_of(Function, "apply")

OP_BY_OP = weakref.WeakKeyDictionary[Any, bool]()
"""Functions of which somebody has said whether forward and backward run on ShardTensors."""


def apply(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`."""
    if not is_sharded(args, kwargs):
        ours = cls.__module__.startswith("weft.")
        if not ours and _holds_tensors(args):
            return _global_view(cls, args, args)
        if ours and is_mapping():  # of a tensor that is closed over
            with outside_maps():
                return original(cls, *args, **kwargs)
        return original(cls, *args, **kwargs)
    tensors = flatten((args, kwargs))
    if is_mapping():
        return _mapped(original, cls, args, kwargs, tensors)
    if not any(type(one) is ShardTensor and one._meta.varying for one in tensors):
        return _applied(cls, args, kwargs, args)
    memories = filled([local_of(one) for one in tensors])
    out = _applied(cls, map_tensors(as_value, args), map_tensors(as_value, kwargs), args)
    watch(out, memories)  # the Function may have saved them
    return out


def _gathered_weights(args: Any) -> Any:
    """The arguments; small ones are gathered over axes that shard another dim of the largest, as
    weights are that are sharded as their batch. Their gradients are reduced once, at the end."""
    largest = max([arg for arg in args if type(arg) is ShardTensor], key=torch.numel, default=None)
    if largest is None:  # they are in a list
        return args
    mine = largest.sharding
    num_shards = math.prod([mine.mesh.axis_sizes[axis] for axis in mine.sharded_axes])

    def gathered(arg: Any) -> Any:
        if type(arg) is not ShardTensor or arg.numel() * num_shards > largest.numel() or (
            arg.device_mesh != largest.device_mesh
        ):
            return arg
        layout, first = arg.sharding, mine.ndim - arg.ndim
        beside = [(None, ())] * -first + [*zip(mine.shape, mine.dims)][max(first, 0) :]
        dims = [
            dim for dim, one in enumerate(zip(layout.shape, layout.dims))
            if {*one[1]} & {*mine.sharded_axes} and one != beside[dim]
        ]
        return arg.redistribute(placements=layout.gathered(dims)) if dims else arg

    return tuple(map(gathered, args))


def _mapped(original: Any, cls: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
    """A Function in a mapped function: by its batching rule, whose call on ShardTensors comes back
    here; without a gradient its forward is ordinary code, if torch may map that."""
    if cls.generate_vmap_rule and not any(one.requires_grad for one in tensors):
        return cls.forward(*args, **kwargs)
    return through_torch(original, (cls, *args), kwargs)


def _applied(cls: Any, args: Any, kwargs: Any, shown: Any) -> Any:
    """`shown`: the arguments themselves, gathered parameters among them, for a Function that may
    ask for the gradients of a module's parameters by these."""
    own = OWN.get(cls)
    if own is not None:
        return own(*args, **kwargs)
    if sends(cls):
        raise refusal(cls, [one.sharding for one in flatten(args) if type(one) is ShardTensor])
    if cls is BackwardHookFunction:
        return _hooked(args)
    if cls is CheckpointFunction:
        return _global_view(cls, args, args)
    metas = [one._meta for one in flatten((args, kwargs)) if type(one) is ShardTensor]
    mesh = mesh_of(f"{cls.__name__}.apply", metas)
    said = OP_BY_OP.get(cls)
    holds = said is not False and _holds_tensors(args)
    if not holds and (is_torch_code(cls) if said is None else said):
        args = _gathered_weights(map_tensors(lambda one: taken(one, mesh), args))
        return _global_view(cls, args, args)
    mixing = mesh.cache.setdefault("mixing", weakref.WeakSet())
    if not holds and cls not in mixing:
        try:
            return on_full_tensors(cls, *args, **kwargs)
        except Mixing:
            mixing.add(cls)
    args, shown = [tuple([taken(one, mesh) for one in given]) for given in (args, shown)]
    return _global_view(cls, args, shown)


def backward(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
    """`torch.autograd.backward`."""
    if is_sharded(tensors, kwargs.get("inputs")):
        return autograd.backward_all(tensors, *args, **kwargs)
    autograd.refuse_nan_check(flatten(tensors))
    with autograd.OneBackward() as running:
        original(tensors, *args, **kwargs)
        running.flush()


def grad(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad`."""
    if is_sharded(args, kwargs):
        return original(*args, **kwargs)  # comes to `autograd.grad` as a call on ShardTensors
    autograd.refuse_nan_check(flatten((args, kwargs)))
    with autograd.OneBackward(captures=True) as running:
        found = original(*args, **kwargs)
        running.flush()
        return found


def to_tensor(original: Any, pair: Any, value: Any) -> torch.Tensor:
    """`torch.testing.assert_close` compares global values."""
    return like_dense(value) if type(value) is ShardTensor else original(pair, value)


def to_dlpack(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """torch's own, in C, would expose the address of a wrapper that has no memory."""
    if type(tensor) is ShardTensor:
        return tensor.__dlpack__()  # which is refused
    return original(tensor, *args, **kwargs)


def increment_version(original: Any, tensors: Any) -> None:
    """`torch.autograd.graph.increment_version`."""
    given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    original([local_of(tensor) for tensor in given])


def plain_apply(cls: Any) -> Callable[..., Any]:
    """`cls.apply` as torch has it, for plain tensors."""
    return partial(_APPLY, cls)


_RULE = ("weft.op_by_op(TheFunction), if its forward and backward consist of torch's operations\n"
         'weft.register_rule(TheFunction, "... -> ...")')


def on_full_tensors(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """A user's Function on full tensors; every rank computes the same."""
    metas = [one._meta for one in flatten((args, kwargs)) if type(one) is ShardTensor]
    mesh = mesh_of(f"{cls.__name__}.apply", metas)
    if mesh.here is None:
        return OutsideMesh(plain_apply(cls), mesh, None).run(cls, args, kwargs)

    def call(*opened: Any, **named: Any) -> Any:
        with on_full(cls.__name__), STRICT.counted():
            return _APPLY(cls, *opened, **named)

    args, kwargs = map_tensors(lambda one: taken(one, mesh), (args, kwargs))
    tell(f"{cls.__name__}.apply", "the Function has no rule", flatten((args, kwargs)),
         _RULE, any_size=False)
    return fallback.on_full(cls.__name__, mesh, call, args, kwargs, are_views=False)


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
        return autograd.wrap_cotangents(self._metas, grads)

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
    metas = autograd.metas_of(args)
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
    """The node of a Function, as its forward and backward see it, in the global view."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()
        self.dirty: tuple[Any, ...] = ()
        self.materialize_grads = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.non_differentiable = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value


class _GlobalView(Function):
    """Runs another Function's forward and backward on ShardTensors.

    torch saves the local tensors, with their graph, and checks that nothing was written to them.
    """

    @staticmethod
    def forward(
        ctx: Any, cls: Any, args: Any, shown: Any, seen: dict[str, Any], *locals_: Any
    ) -> Any:
        ctx.cls, ctx.num_args = cls, len(args)  # and no operand: it need not save them
        ctx.operands = [
            (at, arg._meta if type(arg) is ShardTensor else None) for at, arg in enumerate(args)
            if isinstance(arg, torch.Tensor)
        ]
        ctx.user = user = _Context(tuple(
            isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args
        ))
        if cls.setup_context is Function.setup_context:
            out = cls.forward(user, *shown)
        else:
            out = cls.forward(*shown)
            cls.setup_context(user, shown, out)
        seen["single"] = isinstance(out, torch.Tensor)
        outs = (out,) if seen["single"] else tuple(out)
        if any(user.needs_input_grad):
            outs, user.saved_tensors = _with_gradients(outs, user)
        ctx.metas = seen["metas"] = autograd.metas_of(outs)
        ctx.known = [*map(_to_know, user.saved_tensors)]
        ctx.save_for_backward(*map(_to_save, user.saved_tensors))
        ctx.mark_dirty(*map(local_of, user.dirty))
        ctx.mark_non_differentiable(*map(local_of, user.non_differentiable))
        ctx.set_materialize_grads(user.materialize_grads)
        user.saved_tensors = user.dirty = user.non_differentiable = ()
        return tuple(local_of(one) if isinstance(one, torch.Tensor) else one for one in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        user = ctx.user
        user.saved_tensors = tuple(map(_known_as, ctx.saved_tensors, ctx.known))
        try:
            back = ctx.cls.backward(user, *autograd.wrap_cotangents(ctx.metas, grads))
        finally:
            user.saved_tensors = ()
        back = back if isinstance(back, tuple) else (back,)
        if len(back) < ctx.num_args:
            raise RuntimeError(
                f"function {ctx.cls.__name__}Backward returned an incorrect number of gradients "
                f"(expected {ctx.num_args}, got {len(back)})")
        found = [
            _gradient(back[at], meta)
            if user.needs_input_grad[at] and back[at] is not None else None
            for at, meta in ctx.operands
        ]
        return (None, None, None, None, *found)


def _with_gradients(outs: Any, user: _Context) -> tuple[Any, Any]:
    """Results, and what was saved of them, in layouts that can have gradients: not partial by max
    or min."""
    fixed = {id(one) for one in user.non_differentiable}

    def reduced(one: Any) -> Any:
        if type(one) is not ShardTensor or id(one) in fixed or not one.is_floating_point():
            return one
        layout = one.sharding
        axes = [axis for axis, kind in enumerate(layout.partial) if kind in ("max", "min")]
        return redistribute_to(one, layout.without_partial(axes)) if axes else one

    known = {id(one): reduced(one) for one in outs}
    saved = [known.get(id(one), one) for one in user.saved_tensors]
    return tuple([known[id(one)] for one in outs]), tuple(saved)


def _to_know(one: Any) -> Any:
    """What a saved tensor is known by beside its local one: its meta; or it itself if it is a leaf,
    by which a backward may ask for gradients, or gathered."""
    if type(one) is not ShardTensor:
        return None
    return one if one._meta.varying or (one.requires_grad and one.is_leaf) else one._meta


def _to_save(one: Any) -> Any:
    """Not the memory of a parameter that is gathered, which is freed."""
    return None if type(one) is ShardTensor and one._meta.varying else local_of(one)


def _known_as(local: Any, known: Any) -> Any:
    if known is None or type(known) is ShardTensor:
        return local if known is None else known
    return wrap(local, known.replace(requires_grad=local.requires_grad))


def _gradient(grad: Any, meta: Meta | None) -> torch.Tensor | None:
    """What torch gets for the gradient of an operand: of a plain one, all of it; a rank outside the
    mesh does not know it."""
    if meta is not None:
        return autograd.local_cotangent(meta, grad)
    if not is_sharded(grad):
        return grad
    whole = as_value(grad.redistribute(placements=P()))
    return None if grad._meta.mesh.here is None else local_of(whole)


def _holds_tensors(given: Iterable[Any]) -> bool:
    """Whether there are modules that hold ShardTensors, or functions that use such modules, or
    ShardTensors, beside their arguments; functions of functions only a few deep."""
    level, known = [(one, False) for one in given], set[int]()
    for _ in range(5):
        below: list[tuple[Any, bool]] = []
        for one, is_used in level:
            if isinstance(one, torch.Tensor):
                if is_used and type(one) is ShardTensor:
                    return True
            elif isinstance(one, torch.nn.Module):
                tensors = itertools.chain(one.parameters(), one.buffers())
                if any(type(tensor) is ShardTensor for tensor in tensors):
                    return True
            elif isinstance(one, (list, tuple)):
                below += [(part, is_used) for part in one]
            elif id(one) not in known:
                known.add(id(one))
                below += [(part, True) for part in _used_by(one)]
        level = below
    return False


def _used_by(function: Any) -> list[Any]:
    """What a function, a method or a partial function uses beside its arguments."""
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, MethodType):
        owner = function.__self__
        return [function.__func__, owner, *getattr(owner, "__dict__", {}).values()]
    if not isinstance(function, FunctionType):
        return []
    used = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    used += [function.__globals__.get(name) for name in function.__code__.co_names]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not assigned yet
            used.append(cell.cell_contents)
    return used


def _global_view(cls: Any, args: Any, shown: Any) -> Any:
    seen: dict[str, Any] = {}
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    outs = _APPLY(_GlobalView, cls, args, shown, seen, *map(local_of, tensors))
    written = {id(one._local): one for one in tensors if type(one) is ShardTensor}

    def known(out: Any, meta: Meta | None) -> Any:
        if id(out) not in written:
            return _known_as(out, meta)
        same = written[id(out)]
        if out.requires_grad and not same._meta.requires_grad:
            now_requires_grad(same)
        return same

    wrapped = tuple(map(known, outs, seen["metas"]))
    return wrapped[0] if seen["single"] else wrapped
