"""A program of many processes that runs as one of them, without the others and their files.

Nothing is written over a checkpoint, and no other process is waited for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

__all__ = ["alone", "is_alone"]

_ALONE: set[int] = set()
"""The threads that are."""


def is_alone() -> bool:
    """Whether this thread's program is to save nothing."""
    return threading.get_ident() in _ALONE


def _nothing(*_: Any, **__: Any) -> None:
    """Replaces functions that have an effect outside of the program."""


def _loaded(original: Any) -> Any:
    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        return original(*args[:1], **{**kwargs, "map_location": "meta"})

    return load


@contextmanager
def alone(rank: int, size: int) -> Iterator[None]:
    """Inside, this thread saves nothing, loads tensors without their data, and has a rank, but no
    process to wait for."""
    thread = threading.get_ident()
    kept: list[tuple[Any, str, Any]] = []
    places = [
        (torch, "save", _nothing), (torch, "load", _loaded(torch.load)),
        *[(distributed, name, _nothing)
          for name in ("init_process_group", "destroy_process_group", "barrier")],
        (distributed, "get_rank", lambda *_: rank),
        (distributed, "get_world_size", lambda *_: size),
        *[(torch.cuda, name, _nothing) for name in ("set_device", "synchronize")],
    ]
    for module, name, inside in places:
        original = getattr(module, name)
        kept.append((module, name, original))
        setattr(module, name, _for_thread(thread, inside, original))
    _ALONE.add(thread)
    try:
        yield
    finally:
        _ALONE.discard(thread)
        for module, name, original in kept:
            setattr(module, name, original)


def _for_thread(thread: int, inside: Any, original: Any) -> Any:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        chosen = inside if threading.get_ident() == thread else original
        return chosen(*args, **kwargs)

    return run
