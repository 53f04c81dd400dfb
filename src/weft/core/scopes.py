"""Blocks of `with`: attributes with other values inside, a count of blocks that are open, and a
warning where a public one is called without `with`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from weft.errors import WeftWarning

__all__ = ["Inside", "block", "setting"]

Given = ParamSpec("Given")
T = TypeVar("T")


class _Block(ContextDecorator, AbstractContextManager[T]):
    """A context manager that warns if no `with` has entered it: the call has done nothing."""

    said = ""
    """How it is called; empty once it is used."""

    def __init__(self, make: Callable[[], AbstractContextManager[T]], said: str) -> None:
        self.make, self.inner, self.said = make, make(), said

    def __enter__(self) -> T:
        self.said = ""
        return self.inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.inner.__exit__(*error)

    def _recreate_cm(self) -> _Block[T]:  # as a decorator it is entered at each call
        return _Block(self.make, "")

    def __call__(self, func: Any) -> Any:
        self.said = ""
        return super().__call__(func)

    def __del__(self) -> None:
        if self.said:
            call = self.said.partition(" as ")[0]
            warnings.warn(f"{call} does nothing by itself: with {self.said}: ...",
                          WeftWarning, stacklevel=2)


def block(call: str) -> Callable[
    [Callable[Given, Iterator[T]]], Callable[Given, AbstractContextManager[T]]
]:
    """`contextlib.contextmanager` for a public function; `call` is what stands behind `with`."""

    def decorated(function: Callable[Given, Iterator[T]]) -> Any:
        manager: Any = contextmanager(cast(Any, function))

        @wraps(function)
        def make(*args: Given.args, **kwargs: Given.kwargs) -> _Block[T]:
            return _Block(lambda: manager(*args, **kwargs), call)

        return make

    return decorated


@contextmanager
def setting(owner: Any, **values: Any) -> Generator[None, None, None]:
    """Inside, attributes of an object have these values (of a `threading.local`: in this thread).
    """
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class Inside:
    """`on` counts the open blocks of all threads. A hot path reads this number alone.

    `changed` is called after each change, one change at a time.
    """

    __slots__ = ("changed", "lock", "on")

    def __init__(self, on: int = 0) -> None:
        self.on, self.lock = on, threading.Lock()
        self.changed: Callable[[], None] = lambda: None

    @contextmanager
    def counted(self, by: int = 1) -> Generator[None, None, None]:
        """Inside, the count is higher by this number."""
        self._change(by)
        try:
            yield
        finally:
            self._change(-by)

    def _change(self, by: int) -> None:
        with self.lock:
            self.on += by
            self.changed()
