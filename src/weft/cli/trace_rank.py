"""A script as one rank of `weft trace`: `trace_rank.py FILE SCRIPT ARGUMENTS...`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from weft.transport import trace

__all__: list[str] = []

if __name__ == "__main__":
    target, script = sys.argv[1:3]
    del sys.argv[:2]
    sys.path[0] = str(Path(script).resolve().parent)
    with trace(target):
        runpy.run_path(script, run_name="__main__")
