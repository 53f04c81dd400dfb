"""Local ranks through torch's own launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["RanksFailed", "environment", "events", "is_rank", "launch_command"]


class RanksFailed(Exception):
    """The ranks ended with an error; the text is what they wrote."""


def launch_command(num_ranks: int, program: Sequence[str]) -> list[str]:
    """The command that runs `program` (a script, or "-m" and a module, then arguments) as ranks.

    It is torchrun's, by this interpreter: a port of its own, and an end with an error for all
    ranks when one dies.
    """
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={num_ranks}", *program,
    ]


def is_rank() -> bool:
    """Whether torchrun, or something like it, has started this process as a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def environment() -> dict[str, str]:
    """This process's environment, with one thread per rank unless it says otherwise."""
    return {"OMP_NUM_THREADS": "1", **os.environ}


def events(num_ranks: int, program: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run `program` as ranks; what they write to standard output, one JSON object per line.

    Raises:
        RanksFailed: one of them failed, or died.
    """
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(launch_command(num_ranks, program), env=environment(),
                         stdout=subprocess.PIPE, stderr=errors, text=True) as ranks,
    ):
        assert ranks.stdout is not None
        try:
            for line in ranks.stdout:
                yield json.loads(line)
            status = ranks.wait()
        finally:
            # Also when the user interrupts: the launcher ends its ranks when it is told to end.
            ranks.terminate()
        if status:
            errors.seek(0)
            raise RanksFailed(errors.read())
