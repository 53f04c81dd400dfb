"""What the second step of a program's optimizer moves and holds in a run, to judge dry runs by."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import weft
from weft.testing import peak_memory

__all__ = ["Step", "facts", "second_step"]


class _Enough(BaseException):
    """The second step is over."""


@dataclass(frozen=True)
class Step:
    """The facts of its events, and its peak of memory."""

    events: list[tuple[Any, ...]]
    peak: int


def facts(event: Any) -> tuple[Any, ...]:
    """What a dry run has to say of an event."""
    return (event.op, event.line, event.module, event.transition, event.axes, event.collective,
            event.nbytes, event.direction)


def second_step(program: Callable[[], Any], begun: Callable[[], Any] = lambda: None) -> Step:
    """Run it on this thread until the second step of its optimizer is over, or to its end.

    Args:
        program: makes its meshes itself.
        begun: called at the end of the first step.
    """
    here, memory, log = threading.get_ident(), peak_memory(), weft.explain()
    optimizers: list[Any] = []
    starts: list[int] = []

    def before(optimizer: Any, *_: Any) -> None:
        if threading.get_ident() == here:
            optimizers.append(optimizer)

    def after(optimizer: Any, *_: Any) -> None:
        if threading.get_ident() != here or optimizer is not optimizers[0]:
            return
        if starts:
            raise _Enough
        starts.append(len(events))
        gc.collect()  # cycles of torch's from the first step, whenever they would be collected
        memory._meter.peak = memory.live
        begun()

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        with log as found, memory, suppress(_Enough):
            events = found.events
            program()
    finally:
        for hook in hooks:
            hook.remove()
    return Step([facts(event) for event in events[starts[0]:]], memory.peak)
