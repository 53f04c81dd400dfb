"""Which ops can be registered, and how their calls reach weft.

torch passes calls of its own functions and of `torch.library` ops to the ShardTensor. A Python
function and an `autograd.Function` do not: the function is replaced, and the Function comes
through `Function.apply`, which is replaced too.
"""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import get_testing_overrides

from weft.errors import ShardTypeError
from weft.own.beneath import refuse_beneath
from weft.tensor.call import dispatch
from weft.tensor.call.own.functions import OWN, Own, is_sharded, keys_of
from weft.tensor.grad.torch_patches import on_full_tensors, plain_apply
from weft.tensor.takeover import give_back, take_over, twin_of

__all__ = ["known", "overloads_of", "own_of"]


def _canonical(op: Any) -> Any:
    """The object as which calls of `op` reach weft."""
    if isinstance(op, CustomOpDef):
        return op._opoverload
    if isinstance(op, MethodType) and inspect.isclass(op.__self__) and (
        op.__func__ is getattr(torch.autograd.Function.apply, "__func__", None)
    ):
        return op.__self__  # MyFunction.apply
    if isinstance(op, MethodType):
        return op.__func__
    return op


def known(op: Any) -> Own | None:
    """The registration of `op`, if any."""
    try:
        return OWN.get(_canonical(op))
    except TypeError:  # cannot be hashed
        return None


def own_of(op: Any, call: str) -> Own:
    """The registration of `op`, whose calls have to reach weft; a new empty one if there is
    none."""
    target = _canonical(op)
    found = known(op)
    if found is not None:
        return found
    refuse_beneath(target, call)
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        return _of_function_class(target)
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return _of_torch(target, str(target))
    try:
        is_overridable, is_special = target in get_testing_overrides(), target in dispatch.SPECIAL
    except TypeError:  # cannot be hashed
        is_overridable = is_special = False
    if is_overridable and not is_special:  # torch passes its calls to tensor subclasses
        return _of_torch(target, getattr(target, "__name__", str(target)))
    if isinstance(target, FunctionType):
        return _of_python(target)
    facts = (
        "weft answers it from a tensor's layout, without local tensors" if is_special
        else f"calls of a {type(op).__name__} cannot be seen from outside"
    )
    raise ShardTypeError(
        call, f"{op!r} cannot have a rule or a handler: {facts}",
        "a Python function, an autograd.Function, a torch.library op or a function of "
        "torch can", [f"{type(op).__module__}.{type(op).__qualname__}"],
        "def op(x, w): return module(x, w)    # and register that function")


def _of_function_class(target: Any) -> Own:
    forward = inspect.signature(target.forward)
    if target.setup_context is torch.autograd.Function.setup_context:
        first, *others = forward.parameters.values()  # ctx
        if first.kind is not inspect.Parameter.VAR_POSITIONAL:
            forward = forward.replace(parameters=others)
    return Own(
        target, target.__name__, plain_apply(target),
        lambda *args, **kwargs: on_full_tensors(target, *args, **kwargs), forward,
    )


def _of_torch(target: Any, name: str) -> Own:
    own: Own

    def otherwise(*args: Any, **kwargs: Any) -> Any:
        return dispatch.call(own.function, args, kwargs)

    own = Own(target, name, target, otherwise, None)
    return own


def _of_python(target: FunctionType) -> Own:
    twin = twin_of(target)
    own = Own(target, target.__qualname__, twin, twin, inspect.signature(target))

    def answer(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) if is_sharded(args, kwargs) else twin(*args, **kwargs)

    take_over(target, answer)
    own.undo = lambda: give_back(target, twin)
    return own


def overloads_of(own: Own) -> list[OpOverload]:
    """The overloads of the op in torch's dispatcher."""
    return [one for one in keys_of(own.target) if isinstance(one, OpOverload)]
