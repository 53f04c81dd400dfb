"""The log of `weft.explain()`: the collectives of one rank, as a table and as totals."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.core.display import AsText
from weft.core.units import nbytes_text, seconds_text

__all__ = ["Event", "Log"]

_LEGEND = (
    "S: sharded, S(0) along dim 0; I: replicated, with its gradient; R: replicated, its gradient "
    "partial; P: partial"
)
_NAME = 46
"""Columns for names in a summary, whose lines have 80."""


@dataclass(frozen=True, slots=True)
class Event:
    """One collective of this rank; `nbytes` are the bytes that it received from others.

    `module` is the path of the module whose forward caused it, "" outside of modules. `seconds`
    are those that a dry run estimates, None elsewhere.
    """

    op: str
    line: str
    transition: str
    axes: tuple[str, ...]
    collective: str
    nbytes: int
    direction: str
    reason: str
    module: str = ""
    seconds: float | None = None


@dataclass(slots=True, repr=False)
class Log(AsText):
    """The events of a recording, in order; `open` until the recording ends."""

    events: list[Event] = field(default_factory=list)
    open: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes received in total."""
        return sum(event.nbytes for event in self.events)

    @property
    def seconds(self) -> float:
        """Seconds in total, where they are known."""
        return sum(event.seconds or 0.0 for event in self.events)

    def by_axis_and_op(self) -> dict[tuple[tuple[str, ...], str], int]:
        """Bytes received per (mesh axes, op), in order of first appearance."""
        totals: dict[tuple[tuple[str, ...], str], int] = {}
        for event in self.events:
            key = (event.axes, event.op)
            totals[key] = totals.get(key, 0) + event.nbytes
        return totals

    def summary(self, rows: int | None = 12) -> str:
        """Totals by axis, collective, op, module and source line, the most bytes first.

        Each line has at most 80 columns. Files below the working folder are named from there.
        Bytes are decimal.

        Args:
            rows: at most so many per table: modules that differ in numbers count as one
                (model.layers.*), and so does the rest. None: all.
        """
        timed = any(event.seconds is not None for event in self.events)
        lines = [f"{_collectives(len(self.events))}, {nbytes_text(self.nbytes)} received"
                 + (f", {seconds_text(self.seconds)}" if timed else "")]
        for kind, of in _KINDS.items():
            groups: dict[str, list[Event]] = {}
            for event in self.events:
                groups.setdefault(of(event), []).append(event)
            if kind == "module" and set(groups) <= {""}:
                continue
            if rows is not None and len(groups) > rows:  # all layers of a stack together
                groups = {}
                for event in self.events:
                    groups.setdefault(_NUMBER.sub("*", of(event)), []).append(event)
            lines.append(f"by {kind}")
            ordered = sorted(groups.items(), key=lambda each: -_sum(each[1]))
            shown = ordered if rows is None or len(ordered) <= rows else ordered[: rows - 1]
            rest = [event for _, events in ordered[len(shown):] for event in events]
            if rest:
                shown = [*shown, (f"{len(ordered) - len(shown)} others", rest)]
            lines += [_total(name, events, timed) for name, events in shown]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Log({_collectives(len(self.events))}, {nbytes_text(self.nbytes)} received)"

    def __str__(self) -> str:
        timed = any(event.seconds is not None for event in self.events)
        head = ["op", "module", "line", "transition", "over", "collective", "bytes", "seconds",
                "direction", "reason"]
        rows = [
            [e.op, e.module, _short(e.line), e.transition, ",".join(e.axes), e.collective,
             nbytes_text(e.nbytes), seconds_text(e.seconds or 0.0), e.direction, e.reason]
            for e in self.events
        ]
        left_out = {name for name, is_in in (
            ("module", any(e.module for e in self.events)), ("seconds", timed)) if not is_in}
        kept = [at for at, name in enumerate(head) if name not in left_out]
        table = [[row[at] for at in kept] for row in (head, *rows)]
        right = [head[at] in ("bytes", "seconds") for at in kept]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = [
            "  ".join(cell.rjust(width) if is_number else cell.ljust(width)
                      for is_number, cell, width in zip(right, row, widths)).rstrip()
            for row in table
        ]
        legend = [_LEGEND] if self.events else []
        return "\n".join([*lines, *self.summary().splitlines()[:1], *legend])


_KINDS: dict[str, Callable[[Event], str]] = {
    "axis": lambda event: ",".join(event.axes),
    "collective": lambda event: event.collective,
    "op": lambda event: event.op,
    "module": lambda event: event.module,
    "line": lambda event: _short(event.line),
}


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""Of a module in a list of modules."""


def _collectives(num: int) -> str:
    return "1 collective" if num == 1 else f"{num} collectives"


def _sum(events: list[Event]) -> int:
    return sum(event.nbytes for event in events)


def _total(name: str, events: list[Event], timed: bool) -> str:
    shown = name if len(name) <= _NAME else "..." + name[3 - _NAME:]
    seconds = sum(event.seconds or 0.0 for event in events)
    return (f"  {shown or '-':{_NAME}}{len(events):>9}{nbytes_text(_sum(events)):>12}"
            + (f"{seconds_text(seconds):>10}" if timed else ""))


def _short(line: str) -> str:
    """A source line, from the working folder if its file lies below it."""
    return line.removeprefix(os.getcwd() + os.sep)
