"""What simulated ranks share and processes do not: the module globals of other packages.

What torch and Python keep there is each rank's own (`global_state`). A registry, a stack of
contexts or a counter of another package is met by all ranks at once; the package then fails in a
rank, or takes what another rank has put there.
"""

from __future__ import annotations

import re
from types import TracebackType

__all__ = ["note_on"]

_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[^/\\]*[/\\]")
_CARRIED = frozenset(("weft", "torch", "numpy", "pytest", "_pytest"))
"""Of these, what is global is carried, or is nothing that ranks would meet in; an error that pytest
raises is an assertion of the test's."""


def note_on(error: BaseException, num_ranks: int) -> str | None:
    """What to add to an error that another package has raised in one of several simulated ranks."""
    package = _raised_by(error.__traceback__)
    if package is None or num_ranks < 2:
        return None
    return (
        f"{package} raised it: simulated ranks are threads of one process and share what {package} "
        "keeps in module globals, which processes do not. If that is the cause, the program runs "
        f"over processes: weft run -n {num_ranks} script.py"
    )


def _raised_by(traceback: TracebackType | None) -> str | None:
    """The installed package of the innermost frame, past those of torch and numpy."""
    found = None
    while traceback is not None:
        frame = traceback.tb_frame
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if name not in _CARRIED:
            found = name if _INSTALLED.search(frame.f_code.co_filename) else None
        elif name == "weft":
            found = None
        traceback = traceback.tb_next
    return found
