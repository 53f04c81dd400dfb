"""A transition as a node of autograd's graph, and what cannot pass through one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from weft.core.scopes import Inside
from weft.errors import UnsupportedOpError
from weft.transport.traffic import STATE, note, resume

if TYPE_CHECKING:
    from weft.transport.transition import Transition

__all__ = [
    "MAPS", "REDUCTIONS", "apply", "check_maps", "contained", "counting", "dense",
    "gradient_through", "is_wrapped", "keys_around_maps", "of_bits", "outside_maps",
    "refuse_transforms", "transforms", "untransformed", "with_gradient",
]

A = ParamSpec("A")
R = TypeVar("R")

_C: Any = torch._C
_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]

transforms = _functorch.peek_interpreter_stack
"""The innermost transform of torch.func that is running, or None."""
is_wrapped = _functorch.is_functorch_wrapped_tensor
"""Whether a transform has wrapped this tensor."""


def contained(x: Any) -> Any:
    """The tensor inside the wrappers of all transforms."""
    while is_wrapped(x):
        x = _functorch.get_unwrapped(x)
    return x


def counting(out: Tensor, x: Tensor) -> Tensor:
    """`out`, with the version counter of x: for autograd, a write to x is a write to both."""
    if x.is_inference() or out.is_inference():
        return out  # inference tensors count nothing
    if out.untyped_storage()._cdata == x.untyped_storage()._cdata:
        return out
    made = of_bits(x.detach(), out)
    made.data = out
    return made


def of_bits(x: Tensor, like: Tensor) -> Tensor:
    """An alias of x, conjugate and negative as another tensor is: a meta tensor takes no other
    data."""
    if x.is_conj() != like.is_conj():
        x = x.conj().detach()
    return x if x.is_neg() == like.is_neg() else torch._neg_view(x).detach()


def dense(grad: Tensor) -> Tensor:
    """A gradient as a dense tensor: code on local tensors may give a sparse one."""
    return grad if grad.layout is torch.strided else grad.to_dense()


def refuse_transforms(x: Tensor, call: Callable[[], str], is_constant: bool = False) -> None:
    """Collectives see only values: the information of forward AD, vmap or torch.func is lost."""
    is_dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
    if is_dual or (is_wrapped(x) and not is_constant):
        kind = "dual tensor" if is_dual else "torch.func tensor"
        raise _refusal(call(), f"it was given a {kind}", kind)


class _Watcher(threading.local):
    passing: Callable[[], None] = staticmethod(lambda: None)
    counting: Callable[[], None] = staticmethod(lambda: None)


class _Reductions(Inside):
    """Who is told, on each thread, before a value of the graph is reduced (`passing`), or is
    counted in running statistics when its op has saved what it saves (`counting`).

    `on`: whether anybody is.
    """

    __slots__ = ("thread",)

    def __init__(self) -> None:
        super().__init__()
        self.thread = _Watcher()


REDUCTIONS = _Reductions()


class _Maps(threading.local):
    """`keys`: the dispatch keys, included and excluded, around the outermost transform; else None.
    `met`: what ends a function with tangents that makes or moves ShardTensors."""

    keys: tuple[Any, Any] | None = None
    met: type[Exception] | None = None


MAPS = _Maps()


def check_maps(x: Tensor, call: Callable[[], str]) -> None:
    """Raise for a node of `x` under a transform other than vmap: torch makes none there."""
    if MAPS.keys is None:
        kind = "a tensor that requires grad"
        raise _refusal(call(), f"it was given {kind}, under a transform of torch.func", kind)
    refuse_transforms(x, call)


@contextmanager
def outside_maps() -> Iterator[None]:
    """Inside, no mapped function seems to run: for nodes of tensors that are closed over, not
    mapped."""
    with temporarily_clear_interpreter_stack(), keys_around_maps():
        yield


def keys_around_maps() -> AbstractContextManager[None]:
    """Inside, torch excludes and includes the dispatch keys that it did around the outermost
    transform; of a dispatch mode, which is off while it handles a call, as it is now."""
    assert MAPS.keys is not None
    included, excluded = MAPS.keys
    if not _C._len_torch_dispatch_stack():
        for key in (_C.DispatchKey.Python, _C.DispatchKey.PythonTLSSnapshot):
            included = included.remove(key)
    return _C._ForceDispatchKeyGuard(included, excluded)  # type: ignore[no-any-return]


def untransformed(function: Callable[A, R]) -> Callable[A, R]:
    """A function that makes or moves ShardTensors, also inside of a transform, as if there were
    none: its results are then like what is closed over.

    Raises (when called):
        UnsupportedOpError: an argument depends on what a transform maps or differentiates by.
    """
    @functools.wraps(function)
    def run(*args: A.args, **kwargs: A.kwargs) -> R:
        if MAPS.met is not None:
            raise MAPS.met
        if MAPS.keys is None or transforms() is None:
            return function(*args, **kwargs)
        given = [_constant(one, function.__qualname__) for one in args]
        named = {key: _constant(one, function.__qualname__) for key, one in kwargs.items()}
        with outside_maps():
            return function(*given, **named)  # type: ignore[arg-type]

    return run


def _constant(given: Any, call: str) -> Any:
    """An argument without the wrappers of transforms: torch wraps all that a differentiated
    function makes, but they know no more of a constant."""
    while isinstance(given, Tensor) and is_wrapped(given):
        if given.requires_grad or not _functorch.is_gradtrackingtensor(given):
            raise _refusal(
                call, "it was given a torch.func tensor", "torch.func tensor",
                "call it before the transform, and transform a function of its result")
        refuse_transforms(given, lambda: call, is_constant=True)
        given = _functorch.get_unwrapped(given)
    return given


def _refusal(
    call: str, facts: str, kind: str,
    fix: str = "torch.autograd.grad on ShardTensors, or the transform on x.full_tensor()",
) -> UnsupportedOpError:
    return UnsupportedOpError(
        call, facts, "forward AD, vmap and torch.func do not reach through communication",
        [kind], fix)


class _Apply(torch.autograd.Function):
    """A transition as a node of autograd's graph; its backward is the reverse transition."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, transition: Transition, read_only_use: bool
    ) -> Tensor:
        ctx.transition = transition
        ctx.note = note()
        ctx.set_materialize_grads(False)
        return transition.as_node(x, read_only_use)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # type: ignore[override]
        if grad is None:  # of a user's Function: all ranks run the same one
            return None, None, None
        grad = dense(grad)
        if STATE.on:
            with resume(ctx.note, f"gradient of {ctx.transition.text}"):
                return ctx.transition.reverse(grad), None, None
        transition = ctx.transition
        reverse = transition._reverse or transition.reverse
        return reverse(grad) if grad.requires_grad else reverse._run(grad), None, None


apply: Any = super(torch.autograd.Function, _Apply).apply  # type: ignore[misc]
"""What `_Apply.apply` calls after checking that no functorch transform is active. The check
costs a third of the call; a run refuses the tensors of such a transform."""


Why = str | Callable[[], str]


class _Node(torch.autograd.Function):
    """A function of one tensor; its backward is another function."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, do: Callable[..., Tensor], back: Callable[..., Tensor], why: Why,
        always: bool, *saved: Tensor,
    ) -> Tensor:
        ctx.back, ctx.why, ctx.note = back, why, note()
        ctx.set_materialize_grads(always)
        if saved:
            ctx.save_for_backward(*saved)
        return do(x, *saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # type: ignore[override]
        saved = ctx.saved_tensors
        if grad is not None:
            with resume(ctx.note, ctx.why) if ctx.why else nullcontext():
                grad = ctx.back(dense(grad), *saved)
        return grad, None, None, None, None, *[None for _ in saved]


_run_node: Any = super(torch.autograd.Function, _Node).apply  # type: ignore[misc]


def with_gradient(
    x: Tensor, do: Callable[..., Tensor], back: Callable[..., Tensor], *saved: Tensor,
    why: Why = "", always: bool = True,
) -> Tensor:
    """`do(x, *saved)` as a node of autograd's graph, with the gradient `back(grad, *saved)`.

    Autograd does not look into `do`, and differentiates `back` again: a linear map and its
    transpose are two functions, each of which gives the other as `back`.

    Args:
        saved: what autograd keeps for the backward. It keeps `back` as well, with what that closes
            over: never `x`.
        why: what moves in backward, or what says it, for those who ask for the traffic; empty where
            nothing does.
        always: whether zeros stand for a gradient that does not come; else none goes on.
    """
    run = _run_node if transforms() is None else _Node.apply  # which refuses transforms
    return run(x, do, back, why, always, *saved)


def gradient_through(x: Tensor, back: Transition) -> Tensor:
    """`x`, sharing its memory; `back` transforms its gradient."""
    return with_gradient(x, Tensor.detach, back, why="gradients of local tensors", always=False)
