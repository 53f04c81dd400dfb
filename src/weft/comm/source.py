"""Where in the user's program a rank is: the innermost frame that is not weft's or torch's.

Ranks run one program, so their requests to each other come from one place of it. A `Point` is such
a place: line and columns, because `a if rank else b` has its branches on one line. Its `key` is the
same on all ranks that run the program, from whichever folder each of them reads it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from itertools import islice
from types import CodeType, FrameType

__all__ = ["NOWHERE", "Point", "line_key", "point", "source_line", "user_frame"]

_OURS = f"{__name__.split('.')[0]}."
_NOT_THE_USERS = (_OURS, "torch.", "contextlib.", "functools.", "threading.", "typing_extensions.")


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a program: `line` is file:line, `columns` are those of the call or ""."""

    key: str = ""
    line: str = field(default="", compare=False)
    columns: str = field(default="", compare=False)


NOWHERE = Point()
"""No frame on the stack is the user's: backward in a thread of autograd's own."""


def source_line(frame: FrameType | None = None) -> str:
    """file:line of the innermost frame of the user (from `frame` outward)."""
    return point(frame or sys._getframe(1)).line or "unknown"


def point(frame: FrameType | None = None) -> Point:
    """The place of the innermost frame of the user (from `frame` outward)."""
    frame = user_frame(frame or sys._getframe(1))
    if frame is None:
        return NOWHERE
    code, at = frame.f_code, frame.f_lasti
    known = _points.get((id(code), at))
    if known is None:
        if len(_points) >= _KEPT:
            _points.clear()
        known = _points[id(code), at] = (_point(code, at, frame.f_lineno), code)
    return known[0]


_points: dict[tuple[int, int], tuple[Point, CodeType]] = {}
"""By id of the code, which is kept so that no other code gets that id, and the place in it."""
_KEPT = 4096


def _point(code: CodeType, at: int, lineno: int | None) -> Point:
    _, _, start, end = next(islice(code.co_positions(), at // 2, None), (None,) * 4)
    columns = "" if start is None or end is None else f"{start + 1} to {end}"
    line = f"{code.co_filename}:{lineno}"
    return Point(f"{line_key(line)} {columns}", line, columns)


def line_key(line: str) -> str:
    """A file:line without the folder, and without the numbers in names of generated code."""
    if line.startswith("<"):
        file, _, number = line.rpartition(":")
        return f"{re.sub(r'[0-9]+', '', file)}:{number}"
    return re.split(r"[/\\]", line)[-1]


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """The innermost frame, from `frame` outward, that is not weft's or torch's."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not f"{module}.".startswith(_NOT_THE_USERS):
            return frame
        frame = frame.f_back
    return None
