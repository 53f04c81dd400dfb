"""The log of what moves, behind `weft.explain()`.

A log is open on one thread (one simulated rank); events are this rank's own. While no log is open
anywhere, a transition pays one truth test (`STATE.on`). The dispatcher names the current call
with `label`. The autograd node of a transition keeps that name, so that what backward moves
is listed under the call and line that caused it, also if autograd runs it in a thread of its
own (as it does for accelerators).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from weft.comm import PROCESS, PROVIDER
from weft.core.display import AsText

__all__ = [
    "STATE", "Event", "Label", "Log", "Note", "emit", "label", "moving", "note", "record", "resume",
]


@dataclass(frozen=True, slots=True)
class Label:
    """The call that transitions serve: op, source line, and why operands have to move."""

    op: str = ""
    line: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """One collective of this rank; `nbytes` are the bytes that it received from others."""

    op: str
    line: str
    transition: str
    axes: tuple[str, ...]
    collective: str
    nbytes: int
    direction: str
    reason: str


@dataclass(slots=True, repr=False)
class Log(AsText):
    """The events of a recording, in order; `open` until the recording ends."""

    events: list[Event] = field(default_factory=list)
    open: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes received in total."""
        return sum(event.nbytes for event in self.events)

    def by_axis_and_op(self) -> dict[tuple[tuple[str, ...], str], int]:
        """Bytes received per (mesh axes, op), in order of first appearance."""
        totals: dict[tuple[tuple[str, ...], str], int] = {}
        for event in self.events:
            key = (event.axes, event.op)
            totals[key] = totals.get(key, 0) + event.nbytes
        return totals

    def summary(self) -> str:
        """Bytes received by axis, by op and by source line, the most first, in 80 columns.

        Lines of files below the working folder are named from there. Bytes are decimal.
        """
        kinds = {
            "axis": lambda event: ",".join(event.axes), "op": lambda event: event.op,
            "line": lambda event: _short(event.line),
        }
        lines = [f"{len(self.events)} collectives, {_bytes(self.nbytes)} received"]
        for kind, of in kinds.items():
            totals: dict[str, tuple[int, int]] = {}
            for event in self.events:
                count, nbytes = totals.get(of(event), (0, 0))
                totals[of(event)] = count + 1, nbytes + event.nbytes
            lines.append(f"by {kind}")
            for name, (count, nbytes) in sorted(totals.items(), key=lambda each: -each[1][1]):
                shown = name if len(name) <= 50 else "..." + name[-47:]
                lines.append(f"  {shown or '-':50}{count:>10}{_bytes(nbytes):>14}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Log({len(self.events)} collectives, {_bytes(self.nbytes)} received)"

    def __str__(self) -> str:
        head = ("op", "line", "transition", "over", "collective", "bytes", "direction", "reason")
        rows = [
            (e.op, e.line, e.transition, ",".join(e.axes), e.collective, str(e.nbytes),
             e.direction, e.reason)
            for e in self.events
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        lines = [
            "  ".join(cell.rjust(width) if at == 5 else cell.ljust(width)
                      for at, (cell, width) in enumerate(zip(row, widths))).rstrip()
            for row in (head, *rows)
        ]
        return "\n".join([*lines, f"{len(rows)} collectives, {self.nbytes} bytes received"])


def _bytes(nbytes: int) -> str:
    """Three digits and a unit: 180 bytes, 12.6 MB."""
    if nbytes < 1000:
        return f"{nbytes} bytes"
    units = ("kB", "MB", "GB", "TB", "PB")
    size, unit = nbytes / 1000, 0
    while size >= 999.5 and unit < len(units) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {units[unit]}"


def _short(line: str) -> str:
    """A source line, from the working folder if its file lies below it."""
    folder = os.getcwd() + os.sep
    return line.removeprefix(folder)


class _State:
    """`on`: whether a log is open on any thread, or debug mode wants to know who communicates."""

    __slots__ = ("on", "open", "lock")

    def __init__(self) -> None:
        self.on = False
        self.open = 0
        self.lock = threading.Lock()

    def change(self, by: int) -> None:
        with self.lock:
            self.open += by
            self.on = self.open > 0


STATE = _State()


class _Thread(threading.local):
    logs: tuple[Log, ...] = ()
    label: Label = Label()
    direction: str = "forward"
    transition: str = ""


_thread = _Thread()


@contextmanager
def record() -> Iterator[Log]:
    """Open a log on this thread; logs opened around it get the events too."""
    log, outer = Log(), _thread.logs
    _thread.logs = (*outer, log)
    STATE.change(1)
    try:
        yield log
    finally:
        STATE.change(-1)
        log.open = False
        _thread.logs = outer


@contextmanager
def label(op: str, line: str = "", reason: str = "") -> Iterator[Label]:
    """What moves inside is listed under this op and source line."""
    outer, _thread.label = _thread.label, Label(op, line, reason)
    try:
        yield _thread.label
    finally:
        _thread.label = outer


@contextmanager
def moving(transition: str) -> Iterator[None]:
    """What moves inside belongs to this transition."""
    outer, _thread.transition = _thread.transition, transition
    try:
        yield
    finally:
        _thread.transition = outer


def _asks() -> tuple[str, str, str]:
    mine = _thread.label
    back = "the backward of " if mine.op and _thread.direction == "backward" else ""
    return back + mine.op, mine.line, _thread.transition


PROVIDER.asks = _asks
STATE.change(PROCESS.on)


@dataclass(frozen=True, slots=True)
class Note:
    """What an autograd node keeps for its backward: the label and logs of its forward."""

    label: Label = Label()
    logs: tuple[Log, ...] = ()


def note() -> Note:
    """The current label and logs of this thread."""
    return Note(_thread.label, _thread.logs)


@contextmanager
def resume(kept: Note | None, reason: str) -> Iterator[None]:
    """What moves inside is the backward of the noted call, for the logs of this thread.

    A thread without logs is one of autograd's own; there the noted logs are used, if still open.
    """
    kept = kept or Note()
    outer = _thread.label, _thread.logs, _thread.direction
    _thread.label = Label(kept.label.op, kept.label.line, reason)
    _thread.logs = _thread.logs or tuple(log for log in kept.logs if log.open)
    _thread.direction = "backward"
    try:
        yield
    finally:
        _thread.label, _thread.logs, _thread.direction = outer


def emit(transition: str, axes: tuple[str, ...], collective: str, nbytes: int) -> None:
    """Add a collective to the logs of this thread, under the current label."""
    if not _thread.logs:
        return
    mine = _thread.label
    event = Event(mine.op, mine.line, transition, axes, collective, nbytes, _thread.direction,
                  mine.reason)
    for log in _thread.logs:
        log.events.append(event)
