"""Starts local ranks with `weft run`, from a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from weft.cli.terminal import ScriptError

__all__ = ["RanksFailed", "environment", "events", "launch_command"]


class RanksFailed(ScriptError):
    """The ranks ended with an error; the text is what they wrote. A command shows it, and fails."""


def launch_command(num_ranks: int, script: str, *arguments: str) -> list[str]:
    """The command that runs a script as ranks: `weft run`, by this interpreter."""
    return [sys.executable, "-m", "weft", "run", "-n", str(num_ranks), script, *arguments]


def environment() -> dict[str, str]:
    """This process's environment, with one thread per rank unless it says otherwise."""
    return {"OMP_NUM_THREADS": "1", **os.environ}


def events(num_ranks: int, script: str, asked: Any) -> Iterator[dict[str, Any]]:
    """Run `script` as ranks; yields what they write to standard output, one JSON object per line.

    Its one argument is `asked` as JSON. It can import what this process can.

    Raises:
        RanksFailed: one of them failed, or died.
    """
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            launch_command(num_ranks, script, json.dumps(asked)), text=True,
            env={**environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE, stderr=errors,
        ) as ranks,
    ):
        assert ranks.stdout is not None
        try:
            for line in ranks.stdout:
                yield json.loads(line)
            status = ranks.wait()
        finally:
            # Also when the user interrupts: the launcher ends its ranks when it is asked to end.
            ranks.terminate()
        if status:
            errors.seek(0)
            raise RanksFailed(errors.read())
