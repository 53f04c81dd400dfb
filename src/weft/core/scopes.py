"""What holds inside of a `with`: other values of attributes, and how many are inside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["Inside", "setting"]


@contextmanager
def setting(owner: Any, **values: Any) -> Generator[None, None, None]:
    """Inside, attributes of an object have these values. A `threading.local` is that of a thread.
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
    """`on`: how many are inside, on any thread. It is all that a hot path looks at.

    `changed` is called after each change, one change at a time.
    """

    __slots__ = ("changed", "lock", "on")

    def __init__(self, on: int = 0) -> None:
        self.on, self.lock = on, threading.Lock()
        self.changed: Callable[[], None] = lambda: None

    @contextmanager
    def counted(self, by: int = 1) -> Generator[None, None, None]:
        """Inside of this there are so many more."""
        self._change(by)
        try:
            yield
        finally:
            self._change(-by)

    def _change(self, by: int) -> None:
        with self.lock:
            self.on += by
            self.changed()
