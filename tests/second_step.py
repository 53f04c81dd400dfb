"""What the second step of a program's optimizer moves and holds in a run, to judge dry runs by."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
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
    """The facts of its events, its peak of memory, and how many steps have ended."""

    events: list[tuple[Any, ...]]
    peak: int
    ended: int


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
    here, memory, logs = threading.get_ident(), peak_memory(), []
    optimizers: list[Any] = []
    with ExitStack() as stack:
        def before(optimizer: Any, *_: Any) -> None:
            if threading.get_ident() == here:
                optimizers.append(optimizer)

        def after(optimizer: Any, *_: Any) -> None:
            if threading.get_ident() != here or optimizer is not optimizers[0]:
                return
            if logs:
                logs.append(None)
                raise _Enough
            logs.append(stack.enter_context(weft.explain()))
            memory._meter.peak = memory.live
            begun()

        stack.callback(register_optimizer_step_pre_hook(before).remove)
        stack.callback(register_optimizer_step_post_hook(after).remove)
        with suppress(_Enough), memory:
            program()
    return Step([facts(event) for event in logs[0].events], memory.peak, len(logs))
