"""The message of a rank whose process a backend ends.

If ranks send each other sizes that differ from the expected ones, gloo throws on a thread of its
own where nobody catches it; so does NCCL's watchdog. C++ then ends the process (SIGABRT), and
Python is not notified. So weft sets C++'s own hook for this end (`std::set_terminate`). It looks
where Python's threads are, prints the collective and the line, and calls the previous hook. Nothing
is recorded until then, so collectives pay nothing for it. If the C++ library has no such symbol,
nothing is printed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from types import FrameType
from typing import Any

from weft.comm.collective_call import RULE
from weft.comm.source import source_line, user_frame
from weft.errors import message

__all__ = ["prepare", "words"]

_LIBRARIES = ("libstdc++.so.6", "libc++.1.dylib")
_SET_TERMINATE = "_ZSt13set_terminatePFvvE"
_Hook = ctypes.CFUNCTYPE(None)
_COLLECTIVES = f"{__name__.rpartition('.')[0]}."
_WEFT = f"{__name__.split('.')[0]}."

_kept: list[Any] = []


def prepare(rank: int) -> None:
    """Set the hook, until the interpreter ends. Once per process."""
    set_terminate = _find()
    if _kept or set_terminate is None:
        return

    def speak() -> None:
        try:
            os.write(2, f"rank {rank}: {words()}\n".encode())
        finally:
            _Hook(before)()

    hook = _Hook(speak)
    _kept.append(hook)
    before = set_terminate(ctypes.cast(hook, ctypes.c_void_p))
    atexit.register(set_terminate, before)


def _find() -> Any:
    for library in _LIBRARIES:
        try:
            found = getattr(ctypes.CDLL(library), _SET_TERMINATE)
        except (OSError, AttributeError):
            continue
        found.argtypes, found.restype = [ctypes.c_void_p], ctypes.c_void_p
        return found
    return None


def words() -> str:
    """The collective that the threads of this process are in, and the line of the program."""
    frames = sys._current_frames()
    threads = [frames.pop(threading.main_thread().ident or 0, None), *frames.values()]
    at = next(filter(None, map(_collective, threads)), None)
    if at is None:
        at = "a process with collectives", f"it was at {source_line(threads[0])}"
    return message(
        at[0], f"the backend ends the process, as it does when ranks disagree: {at[1]}", RULE, (),
        "WEFT_DEBUG=1 compares what the ranks ask for before they do it, and names the line of "
        "each; what the backend says stands below",
    )


def _collective(frame: FrameType | None) -> tuple[str, str] | None:
    """The collective that a thread is in, in words, and who requests it."""
    line, user = source_line(frame), user_frame(frame)
    found, call = "", ""
    while frame is not None and frame is not user:
        module, names = frame.f_globals.get("__name__", ""), frame.f_locals
        if module.startswith(_COLLECTIVES) and hasattr(names.get("self"), "where"):
            op = names.get("op") or frame.f_code.co_name.strip("_")
            found = f"{op} over {names['self'].where}"
        if module.startswith(_WEFT):
            call = getattr(names.get("func"), "__name__", frame.f_code.co_name).strip("_")
        frame = frame.f_back
    return (found, f"it was at {call}, at {line}") if found else None
