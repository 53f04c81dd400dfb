"""Local ranks through torch's own launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["environment", "launch_command"]


def launch_command(num_ranks: int, program: Sequence[str]) -> list[str]:
    """The command that runs `program` (a script, or "-m" and a module, then arguments) as ranks.

    It is torchrun's, by this interpreter: a port of its own, and an end with an error for all
    ranks when one dies.
    """
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={num_ranks}", *program,
    ]


def environment() -> dict[str, str]:
    """This process's environment, with one thread per rank unless it says otherwise."""
    return {"OMP_NUM_THREADS": "1", **os.environ}
