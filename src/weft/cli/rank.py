"""A script as one rank of `weft run`: errors are printed once for all ranks, and briefly.

This file is run by its path and imports only the standard library, so that the script finds what it
would find if it were run directly. Errors are shown with the lines of the user; those of weft and
of torch are omitted unless WEFT_DEBUG is set. Ranks that raise the same error leave it to the first
of them, which briefly waits for the others: they meet in a directory.
"""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["told"]

REPORTS = "WEFT_RUN_REPORTS"
_WEFT = str(Path(__file__).parents[1]) + os.sep
_TOGETHER_S = 0.5
"""How long the first rank that raises waits for others that raise the same."""

_CAUSE_S = 1.5
"""How long a rank that waited in vain waits for the error of another, which is the cause."""


def main() -> None:
    """Run `sys.argv[1]` with the arguments after it, as Python itself does."""
    for stream in (sys.stdout, sys.stderr):  # keeps lines of several ranks whole
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    script = sys.argv[1]
    del sys.argv[0]
    sys.path[0] = str(Path(script).resolve().parent)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = module
    try:
        code = compile(Path(script).read_bytes(), script, "exec")
        exec(code, module.__dict__)
    except (Exception, KeyboardInterrupt) as error:  # interrupted, it says where it was
        _report(error)
    else:
        return
    sys.exit(1)


def told(error: BaseException) -> str:
    """The traceback, without frames of weft and torch if any other remains."""
    said: Any = traceback.TracebackException.from_exception(error)
    everything = os.environ.get("WEFT_DEBUG", "") not in ("", "0")
    if not everything:
        found = _shorten(said, outermost=True)
        if not found and isinstance(error, SyntaxError):  # of the script itself: as Python says it
            said.stack = None
    text = "".join(said.format()).rstrip()
    if not everything and not isinstance(error, SyntaxError):
        text = text.replace(
            "(most recent call last):",
            "(most recent call last; frames of weft and torch with WEFT_DEBUG=1):", 1
        )
    return text


def _shorten(said: traceback.TracebackException, outermost: bool = False) -> bool:
    """Omit frames, and causes that have no others; returns whether any remains."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    hidden = (_WEFT, "<frozen ", *([str(Path(torch).parent) + os.sep] if torch else []))
    frames = [
        traceback.FrameSummary(one.filename, one.lineno, one.name, line=one.line)  # no carets
        for one in said.stack if not one.filename.startswith(hidden)
    ]
    if frames or not outermost:
        said.stack = traceback.StackSummary.from_list(frames)
    for name in ("__cause__", "__context__"):
        before = getattr(said, name)
        if before is not None and not _shorten(before):
            setattr(said, name, None)
    return bool(frames)


def _report(error: BaseException) -> None:
    """Print it once for all ranks with the same error."""
    # The launcher ends the others as soon as one has ended; what has begun is said all the same.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank, text, reports = int(os.environ["RANK"]), told(error), Path(os.environ[REPORTS])
    waited = type(error).__name__ == "CommunicationError" and " stopped waiting: " in str(error)
    if waited and _wait(lambda: any(reports.glob("*.error")), _CAUSE_S):
        _write(f"rank {rank} stopped waiting for the others")
        (reports / f"{rank}.ended").touch()
        return
    key = hashlib.sha1(text.encode()).hexdigest()
    (reports / f"{rank}.{key}").touch()
    try:
        (reports / f"{key}.{'waited' if waited else 'error'}").touch(exist_ok=False)
    except FileExistsError:
        if (reports / f"{key}.said").exists():  # this one comes late
            _write(f"rank {rank} ended with that error, too")
    else:
        all_of_them = int(os.environ["WORLD_SIZE"])
        _wait(lambda: len(list(reports.glob(f"*.{key}"))) == all_of_them, _TOGETHER_S)
        (reports / f"{key}.said").touch()
        ranks = sorted(int(path.stem) for path in reports.glob(f"*.{key}"))
        _write(f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}")
    (reports / f"{rank}.ended").touch()


def _wait(until: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not until() and time.monotonic() < end:
        time.sleep(0.02)
    return until()


def _write(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")  # in one write, so that ranks do not mix their lines
    sys.stderr.flush()


if __name__ == "__main__":
    main()
