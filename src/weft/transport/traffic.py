"""The log of what moves, behind `weft.explain()`.

A log is open on one thread (one simulated rank); events are this rank's own. While no log is open
anywhere, a transition pays one truth test (`STATE.on`). The dispatcher names the current call
with `label`. The autograd node of a transition keeps that name. So what backward moves is listed
under the call and line that caused it. This also holds if autograd runs it in a thread of its own,
as it does for accelerators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from weft.comm import PROCESS, PROVIDER, Communicator, source_line
from weft.core.scopes import Inside, setting
from weft.transport.log import Event, Log
from weft.transport.modules import current_module, following_modules

__all__ = [
    "STATE", "Event", "Label", "Log", "Note", "emit", "label", "moving", "note", "record", "resume",
    "sending",
]


@dataclass(frozen=True, slots=True)
class Label:
    """The call that transitions serve: op, source line, why operands have to move, and the path of
    the module that calls."""

    op: str = ""
    line: str = ""
    reason: str = ""
    module: str = ""


STATE = Inside(int(PROCESS.on))
"""`on`: whether a log is open on any thread, or debug mode wants to know who communicates."""


class _Thread(threading.local):
    logs: tuple[Log, ...] = ()
    label: Label = Label()
    direction: str = "forward"
    transition: str = ""


_thread = _Thread()
_NOTHING = nullcontext()


@contextmanager
def record() -> Iterator[Log]:
    """Open a log on this thread; logs opened around it get the events too."""
    log = Log()
    with setting(_thread, logs=(*_thread.logs, log)), STATE.counted():
        try:
            with following_modules():
                yield log
        finally:
            log.open = False


def label(
    op: str, reason: str | Callable[[], str] = "", line: str | None = None
) -> AbstractContextManager[None]:
    """Moves inside the block are listed under this op and source line (None: where the user is)."""
    if not STATE.on:
        return _NOTHING
    reason = reason if isinstance(reason, str) else reason()
    line = source_line() if line is None else line
    return setting(_thread, label=Label(op, line, reason, current_module()))


def moving(transition: str) -> AbstractContextManager[None]:
    """Moves inside the block belong to this transition."""
    return setting(_thread, transition=transition) if STATE.on else _NOTHING


def _asks() -> tuple[str, str, str]:
    mine = _thread.label
    back = "the backward of " if mine.op and _thread.direction == "backward" else ""
    return back + mine.op, mine.line, _thread.transition


PROVIDER.asks = _asks


@dataclass(frozen=True, slots=True)
class Note:
    """The label and logs of a forward, which an autograd node keeps for its backward."""

    label: Label = Label()
    logs: tuple[Log, ...] = ()


def note() -> Note | None:
    """The current label and logs of this thread, where somebody may ask for them."""
    return Note(_thread.label, _thread.logs) if STATE.on else None


def resume(kept: Note | None, reason: str | Callable[[], str]) -> AbstractContextManager[None]:
    """Moves inside the block are the backward of the noted call, in the logs of this thread.

    A thread without logs is one of autograd's own; there the noted logs are used, if still open.
    """
    if not STATE.on:
        return _NOTHING
    kept = kept or Note()
    reason = reason if isinstance(reason, str) else reason()
    return setting(
        _thread, label=Label(kept.label.op, kept.label.line, reason, kept.label.module),
        logs=_thread.logs or tuple(log for log in kept.logs if log.open), direction="backward",
    )


def emit(transition: str, axes: tuple[str, ...], collective: str, nbytes: int) -> None:
    """Add a collective to the logs of this thread, under the current label."""
    if not _thread.logs:
        return
    mine = _thread.label
    event = Event(mine.op, mine.line, transition, axes, collective, nbytes, _thread.direction,
                  mine.reason, mine.module)
    for log in _thread.logs:
        log.events.append(event)


def sending(
    comm: Communicator, what: str, collective: str, nbytes: int
) -> AbstractContextManager[None]:
    """Around a collective of a group that carries out no plan: `what` it is, and the bytes that
    this rank receives."""
    if not STATE.on or comm.size == 1:
        return _NOTHING
    emit(what, tuple(map(str, comm.axes)), collective, nbytes)
    return moving(what)
