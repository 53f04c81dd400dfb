"""How one call is carried out, decided once and kept.

A recipe is built for one function and the metas of its operands on one rank. There are three kinds:
a `Program` (see `program`), a `Function`, an `Alias`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.tensor.meta import Meta
from weft.tensor.placing.operands import Caller
from weft.tensor.trace.trees import fill, flatten, slots_of
from weft.transport.transition import Transition

__all__ = ["Alias", "Function", "Recipe"]


class Recipe:
    """Base. A recipe with `fast` is carried out by the short route, without `run`.

    Such a call has one result, and no tensors in lists that move. `fast` is the result's meta,
    `moves` has the transitions by argument place (keywords last), `caller` is their owner, `bound`
    runs on local tensors in place of the function, `leave` is the transition of the result.
    """

    __slots__ = ()
    fast: Meta | None = None
    moves: tuple[tuple[int, Transition], ...] = ()
    caller: Caller | None = None
    bound: Any = None
    leave: Transition | None = None
    as_called = False
    """Whether the function runs with the caller's own numbers, none of them baked in."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry the call out."""
        raise NotImplementedError

    def run_opened(self, func: Any, args: Any, locals_: list[Any]) -> Any:
        """`run` from the short route, which has opened the arguments already."""
        return self.run(func, args, {})


class Function(Recipe):
    """A Python function that is given the call's own arguments.

    Args:
        function: of the called function, its arguments and its keywords.
        as_called: see `Recipe`.
        takes_opened: whether it also takes the arguments with local tensors, which the short route
            has: that saves time.
    """

    __slots__ = ("as_called", "function", "takes_opened")

    def __init__(
        self, function: Callable[..., Any], as_called: bool = False, takes_opened: bool = False
    ) -> None:
        self.function, self.as_called, self.takes_opened = function, as_called, takes_opened

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.function(func, args, kwargs)

    def run_opened(self, func: Any, args: Any, locals_: list[Any]) -> Any:
        if self.takes_opened:
            return self.function(func, args, {}, locals_)
        return self.function(func, args, {})


class Alias(Recipe):
    """The result consists of the arguments themselves and of constants."""

    __slots__ = ("is_constant", "result")

    def __init__(self, result: Any) -> None:
        self.result = result
        self.is_constant = not slots_of(result)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.is_constant:
            return self.result
        return fill(self.result, flatten((args, kwargs)))
