"""What simulated ranks share and processes do not: the module globals of other packages.

The globals of torch and Python are separate for each rank (`global_state`). A registry, a stack of
contexts or a counter of another package is shared by all ranks at once; the package then fails in a
rank, or reads what another rank has written.
"""

from __future__ import annotations

import re
from types import TracebackType

from weft.errors import CommunicationError

__all__ = ["note_on"]

_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[^/\\]*[/\\]")
_CARRIED = frozenset(("weft", "torch", "numpy", "pytest", "_pytest"))
"""Their globals are either carried or irrelevant; an error that pytest raises is an assertion of
the test."""

_NO_GROUP = "Default process group has not been initialized"


def note_on(error: BaseException, num_ranks: int) -> str | None:
    """The note for an error that another package, or torch.distributed, has raised in a rank."""
    if isinstance(error, ValueError) and _NO_GROUP in str(error):
        return (
            "simulated ranks have no torch.distributed: mesh.rank, mesh.size() and "
            "mesh.get_local_rank(axis) say which rank this is, or the program runs over processes: "
            f"weft run -n {num_ranks} script.py"
        )
    disagree = isinstance(error, CommunicationError)
    package = _package_in(error.__traceback__, disagree)
    if package is None or num_ranks < 2:
        return None
    return (
        f"{package} {'called' if disagree else 'raised'} it: simulated ranks are threads of one "
        f"process and share what {package} keeps in module globals, which processes do not. If "
        f"that is the cause, the program runs over processes: weft run -n {num_ranks} script.py"
    )


def _package_in(traceback: TracebackType | None, calls_weft: bool) -> str | None:
    """The installed package of the innermost frame, except torch and numpy. Inside weft it is none,
    or the package that has called weft."""
    found = None
    while traceback is not None:
        frame = traceback.tb_frame
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if name not in _CARRIED:
            found = name if _INSTALLED.search(frame.f_code.co_filename) else None
        elif name == "weft" and not calls_weft:
            found = None
        traceback = traceback.tb_next
    return found
