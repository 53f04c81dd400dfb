"""A module's `main`, as `python -m` runs it, in a process forked from one that has imported torch.

The import takes longer than most launchers run. What they launch is started as ever.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.gloo import forkserver

__all__ = ["run"]


def run(
    module: str, *arguments: str, environment: Mapping[str, str], timeout: float = 150
) -> subprocess.CompletedProcess[str]:
    """What `python -m module arguments` writes, and its exit status."""
    with tempfile.TemporaryDirectory(prefix="weft-forked-") as folder:
        process = forkserver().Process(
            target=_main, args=(module, arguments, dict(environment), os.getcwd(), folder))
        process.start()
        process.join(timeout)
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        if process.exitcode is None:
            process.terminate()  # a launcher ends its ranks then
            process.join(10)
            process.kill()
            raise subprocess.TimeoutExpired([module, *arguments], timeout, out, err)
    return subprocess.CompletedProcess([module, *arguments], process.exitcode, out, err)


def _main(
    module: str, arguments: list[str], environment: dict[str, str], here: str, folder: str
) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    os.chdir(here)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
