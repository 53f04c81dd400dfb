"""Which module's forward runs on this thread, by its path from the outermost one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["current_module", "following_modules"]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[str] = []
        self.names: dict[int, str] = {}


class _Hooks:
    def __init__(self) -> None:
        self.users = 0
        self.lock = threading.Lock()
        self.handles: list[Any] = []


_thread = _Thread()
_hooks = _Hooks()


def current_module() -> str:
    """The path of the innermost module that runs; "" if none does, or they are not followed.

    The outermost one has the name of its class.
    """
    running = _thread.running
    return running[-1] if running else ""


@contextmanager
def following_modules() -> Iterator[None]:
    """Inside, the modules are known: calls of modules take some microseconds longer."""
    with _hooks.lock:
        _hooks.users += 1
        if _hooks.users == 1:
            _hooks.handles = [
                register_module_forward_pre_hook(_enter),
                register_module_forward_hook(_leave, always_call=True),
            ]
    try:
        yield
    finally:
        with _hooks.lock:
            _hooks.users -= 1
            if not _hooks.users:
                for handle in _hooks.handles:
                    handle.remove()
                _thread.running.clear()


def _enter(module: nn.Module, _: Any) -> None:
    running = _thread.running
    if not running:
        _thread.names = {id(part): path for path, part in module.named_modules()}
    name = _thread.names.get(id(module), "")
    running.append(name or type(module).__name__)


def _leave(module: nn.Module, *_: Any) -> None:
    if _thread.running:  # else it was entered before anybody followed
        _thread.running.pop()
