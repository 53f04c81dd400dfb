"""Runs a user's script as one rank, and ends the process where the script ends.

A process that has used several gloo groups aborts, now and then, in C++ while the interpreter
is torn down ("terminate called without an active exception"), after all of its work is done. So
this runner does what Python does at the end of a script, exit handlers and flushing included, and
then leaves without the teardown.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import traceback
from pathlib import Path

__all__ = ["main"]


def main() -> None:
    """`python -m weft.cli.script script.py args...`, or `-m module args...`"""
    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2 if is_module else 1 :]
    name = sys.argv[0]
    if not is_module:
        sys.path[0] = str(Path(name).resolve().parent)
    code = _run(name, is_module)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(name: str, is_module: bool) -> int:
    """The exit status that Python would give the script or module."""
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
