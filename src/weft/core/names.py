"""Names of arguments: those that other libraries have for them, and what to say of unknown ones.

A function keeps one name for each argument in its signature. What torch, JAX or torch_xla call the
same thing is taken too, so that a call that was carried over works as it stands. A name that means
something else there is answered by the code that does it here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar, cast

from weft.errors import ShardTypeError

__all__ = ["ADVICE", "PLACEMENTS", "also_called", "own_names"]

A = ParamSpec("A")
R = TypeVar("R")

PLACEMENTS = {"spec": "placements", "sharding": "placements", "partition_spec": "placements"}
"""What weft's factories, JAX and torch_xla call placements."""

ADVICE = {
    "sizes": 'placements=Layout(mesh, shape, P("dp"), sizes={0: (5, 3)})',
    "layout": "placements=P(...); layout is torch's word for strided and sparse tensors",
}
"""What is meant by names that no call has which takes placements."""

_TAKES_ANY_NAME = 0x08  # of a code object: it has **kwargs


def also_called(
    advice: Mapping[str, str] | None = None, call: str | None = None, /, **names: str
) -> Callable[[Callable[A, R]], Callable[A, R]]:
    """Let a function also take arguments by other names: other name -> its own.

    Args:
        advice: unknown name -> the code that does what was meant; "" stands for all others.
        call: the function's public name, if it is not that of its definition.
        names: other name -> own name.

    Raises (when called):
        ShardTypeError: an unknown name; something given by two names.

    >>> @also_called(device_mesh="mesh")
    ... def size(mesh):
    ...     return len(mesh)
    >>> size(device_mesh={"dp": 2})
    1
    """

    def decorate(function: Callable[A, R]) -> Callable[A, R]:
        code = inspect.unwrap(function).__code__
        own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        known = None if code.co_flags & _TAKES_ANY_NAME else own
        makes = function.__name__ == "__init__"

        @functools.wraps(function)
        def taking(*args: A.args, **kwargs: A.kwargs) -> R:
            if kwargs:
                made = type(args[0]).__name__ if makes else function.__qualname__
                named = own_names(call or made, kwargs, names, known, advice or {})
                kwargs.clear()
                kwargs.update(named)
            return function(*args, **kwargs)

        return taking

    return decorate


def own_names(
    call: str, given: Mapping[str, Any], names: Mapping[str, str],
    known: Collection[str] | None, advice: Mapping[str, str],
) -> dict[str, Any]:
    """The named arguments of a call, each by its own name. `known` are the call's own names; None
    takes all."""
    own = dict(given)
    for other in names.keys() & given.keys():
        name, value = names[other], own.pop(other)
        if own.get(name) is not None:
            raise ShardTypeError(
                f"{call}({other}=, {name}=)", "both are given",
                f"{other} is another name of {name}, which is given once", [other, name],
                f"{call}(..., {name}=...)")
        own[name] = value
    if known is not None and not own.keys() <= set(known):
        raise _unknown(call, [name for name in own if name not in known], known, names, advice)
    return own


def _unknown(
    call: str, unknown: list[str], known: Collection[str], names: Mapping[str, str],
    advice: Mapping[str, str],
) -> ShardTypeError:
    own = [name for name in known if name != "self" and not name.startswith("_")]
    fixes = [advice[name] for name in unknown if name in advice]
    if not fixes:
        for name in unknown:
            near = get_close_matches(name, [*own, *names] if len(name) > 2 else [], 1, 0.55)
            fixes += [f"{call}(..., {names.get(one, one)}=...)" for one in near]
    fix = "; ".join(dict.fromkeys(fixes)) or advice.get("", "one of these names")
    return ShardTypeError(
        f"{call}({', '.join(f'{name}=' for name in unknown)})",
        f"{len(unknown)} named argument{'s are' if len(unknown) > 1 else ' is'} none of its "
        f"{len(own)}", f"it takes {', '.join(own)}", cast(list[object], unknown), fix)
