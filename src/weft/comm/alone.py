"""A program of many processes that runs as one of them, without the others and their files.

Nothing is written over a checkpoint, and no other process is waited for. torch's process groups are
those of a recording world.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.distributed import device_mesh, distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from weft.comm.recorded_groups import Registry
from weft.comm.recording import RecordingWorld
from weft.core.scopes import Inside, setting

__all__ = ["alone", "is_alone"]


class _Thread(threading.local):
    registry: Registry | None = None


_thread = _Thread()


_alone = Inside()
_originals: list[tuple[Any, str, Any]] = []


def is_alone() -> bool:
    """Whether this thread's program is to save nothing."""
    return _thread.registry is not None


@contextmanager
def alone(world: RecordingWorld) -> Iterator[None]:
    """Inside, this thread saves nothing, loads tensors without their data, and is the world's rank
    for torch.distributed, but with no process to wait for."""
    registry = world.registry = Registry(world)
    with setting(_thread, registry=registry), _alone.counted():
        yield


def _replace() -> None:
    """While any thread is alone, functions of torch are others."""
    if _alone.on and not _originals:
        for module, name, make in _PLACES:
            original = getattr(module, name)
            _originals.append((module, name, original))
            setattr(module, name, make(original))
    while not _alone.on and _originals:
        setattr(*_originals.pop())


_alone.changed = _replace


def _inside(do: Any) -> Any:
    """What makes a replacement: `do(original, ...)` in threads that are alone."""
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            return do(original, *args, **kwargs) if is_alone() else original(*args, **kwargs)

        return run

    return make


class _Worlds:
    """torch's registry of process groups: that of this thread, if it is alone."""

    def __init__(self, original: Any) -> None:
        object.__setattr__(self, "_original", original)

    def __getattr__(self, name: str) -> Any:
        return getattr(_thread.registry or self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_thread.registry or self._original, name, value)


def _nothing(original: Any, *_: Any, **__: Any) -> None:
    """Replaces functions that have an effect outside of the program."""


def _load(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args[:1], **{**kwargs, "map_location": "meta"})


def _of_registry(name: str) -> Any:
    """What replaces a function by the registry's own."""
    return _inside(lambda _, *args, **kwargs: getattr(_thread.registry, name)(*args, **kwargs))


def _as_bytes(original: Any, value: Any, _: Any, *args: Any) -> Any:
    """An object that is sent has its data."""
    with _disable_current_modes():
        return original(value, "cpu", *args)


_PLACES: list[tuple[Any, str, Any]] = [
    (torch, "save", _inside(_nothing)), (torch, "load", _inside(_load)),
    *[(module, name, _inside(_nothing)) for module in (distributed, distributed_c10d)
      for name in ("init_process_group", "destroy_process_group")],
    *[(module, "new_group", _of_registry("new_group"))
      for module in (distributed, distributed_c10d, device_mesh)],
    *[(module, "_resolve_process_group", _of_registry("named"))
      for module in (distributed_c10d, device_mesh)],
    (distributed_c10d, "_world", _Worlds),
    (distributed_c10d, "_object_to_tensor", _inside(_as_bytes)),
    *[(torch.cuda, name, _inside(_nothing)) for name in (
        "set_device", "synchronize", "reset_peak_memory_stats", "reset_accumulated_memory_stats")],
]
