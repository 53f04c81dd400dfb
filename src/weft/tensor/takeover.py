"""Replaces a function wherever it has been imported.

Rebinding a module's name would miss `from torch.autograd import backward` and `apply =
MyFunction.apply`, made before. So the function object stays and its code is exchanged: it calls the
replacement, which may call a copy of the original (its twin). A function written in C has no code
to exchange, so its name is bound anew, and of a class method also the names that it has elsewhere.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from functools import cache, partial
from types import BuiltinMethodType, ClassMethodDescriptorType, CodeType, FunctionType
from typing import Any

__all__ = ["class_method_of", "give_back", "replace", "take_over", "twin_of"]


@cache
def _calls_answer(cells: tuple[str, ...]) -> CodeType:
    """Code that calls `_weft_answer_`, with the free variables that the closure has cells for: that
    is what CPython asks for; debuggers and TorchScript read them."""
    names = ", ".join(cells) or "()"
    source = f"""
def outer({names if cells else ""}):
    def call(*args, _weft_answer_, **kwargs):
        if False:
            {names}
        return _weft_answer_(*args, **kwargs)
    return call
"""
    made: dict[str, Any] = {}
    exec(compile(source, "<taken over by weft>", "exec"), made)
    return made["outer"](*cells).__code__


def twin_of(function: FunctionType) -> FunctionType:
    """A function of the same code as `function` has now."""
    twin = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__qualname__, twin.__doc__ = function.__qualname__, function.__doc__
    twin.__module__ = function.__module__
    return twin


def class_method_of(owner: type, name: str) -> Callable[..., Any]:
    """What is behind a class method now, which takes the class first."""
    found = inspect.getattr_static(owner, name)
    if not isinstance(found, ClassMethodDescriptorType):
        return twin_of(found.__func__)

    def call(cls: type, *args: Any, **kwargs: Any) -> Any:
        return found.__get__(None, cls)(*args, **kwargs)

    return call


def take_over(function: FunctionType, answer: Callable[..., Any]) -> FunctionType:
    """Make every call of `function` a call of `answer`; gives the original's twin."""
    twin = twin_of(function)
    signature = inspect.signature(function)
    before = function.__code__
    code = _calls_answer(before.co_freevars).replace(  # TorchScript compiles the source there
        co_name=before.co_name, co_filename=before.co_filename,
        co_firstlineno=before.co_firstlineno,
    )
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__defaults__, function.__kwdefaults__ = None, {"_weft_answer_": answer}
    function.__code__ = code
    return twin


def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Make every call of `owner.name` one of `replacement`, which gets the original first.

    Of an attribute written in C, that is what assigns to it.
    """
    found = inspect.getattr_static(owner, name)
    function = getattr(found, "__func__", found)  # of a class method or a static one
    if isinstance(function, FunctionType):
        take_over(function, partial(replacement, twin_of(function)))
    elif isinstance(found, ClassMethodDescriptorType):
        setattr(owner, name, classmethod(_calling(replacement, class_method_of(owner, name))))
        _rebind(owner, name)
    elif hasattr(found, "__set__"):
        setter = partial(replacement, found.__set__)
        setattr(owner, name, property(found.__get__, setter, found.__delete__))
    else:
        setattr(owner, name, _calling(replacement, getattr(owner, name)))


def _rebind(owner: type, name: str) -> None:
    """Replace what was bound before, as by `apply = MyFunction.apply`, in modules and classes."""
    bound = [
        one for one in gc.get_objects()
        if type(one) is BuiltinMethodType and one.__name__ == name
        and isinstance(one.__self__, type) and issubclass(one.__self__, owner)
    ]
    for holder in gc.get_referrers(*bound) if bound else ():
        for key, value in list(holder.items()) if type(holder) is dict else ():
            if type(value) is BuiltinMethodType and any(value is one for one in bound):
                holder[key] = getattr(value.__self__, name)
                for one in gc.get_referrers(holder):  # a class caches what it has looked up
                    if isinstance(one, type) and one.__dict__.get(key) is holder[key]:
                        setattr(one, key, holder[key])


def _calling(replacement: Callable[..., Any], original: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return call


def give_back(function: FunctionType, twin: FunctionType) -> None:
    """Undo `take_over`, which gave `twin`."""
    function.__code__ = twin.__code__
    function.__defaults__, function.__kwdefaults__ = twin.__defaults__, twin.__kwdefaults__
    del function.__signature__  # type: ignore[attr-defined]
