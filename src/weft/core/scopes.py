"""Blocks of `with`: attributes with other values inside, and a count of blocks that are open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["Inside", "setting"]


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
