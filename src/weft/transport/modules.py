"""Which module's forward runs on this thread, by its path from the outermost one."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from weft.core.scopes import Inside

__all__ = ["current_module", "following_modules"]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[str] = []
        self.names: dict[int, str] = {}


_thread = _Thread()
_followed = Inside()
_handles: list[Any] = []


def current_module() -> str:
    """The path of the innermost module that runs; "" if none does, or they are not followed.

    The outermost one has the name of its class.
    """
    running = _thread.running
    return running[-1] if running else ""


def following_modules() -> AbstractContextManager[None]:
    """Inside, the modules are known: calls of modules take some microseconds longer."""
    return _followed.counted()


def _hook() -> None:
    if _followed.on and not _handles:
        _handles.append(register_module_forward_pre_hook(_enter))
        _handles.append(register_module_forward_hook(_leave, always_call=True))
    elif not _followed.on:
        while _handles:
            _handles.pop().remove()
        _thread.running.clear()


_followed.changed = _hook


def _enter(module: nn.Module, _: Any) -> None:
    running = _thread.running
    if not running:
        _thread.names = {id(part): path for path, part in module.named_modules()}
    name = _thread.names.get(id(module), "")
    running.append(name or type(module).__name__)


def _leave(module: nn.Module, *_: Any) -> None:
    if _thread.running:  # else it was entered before anybody followed
        _thread.running.pop()
