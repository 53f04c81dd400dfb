"""torch's launcher in this process: each failed rank is reported in one line."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from weft.cli import rank
from weft.cli.launch import environment

__all__ = ["run"]


def run(num_ranks: int, program: Sequence[str]) -> int:
    """Run a script and its arguments as ranks, each by `rank.py`; the exit status.

    It is that of the rank which failed first, and 1 if a signal ended it. The output of the ranks
    goes where this process writes.
    """
    os.environ.update(environment())
    options = ["--standalone", f"--nproc-per-node={num_ranks}", rank.__file__, *program]
    before = logging.root.manager.disable
    if os.environ.get("WEFT_DEBUG", "") in ("", "0"):
        logging.disable(logging.ERROR)  # the launcher's messages about ranks that end
    with tempfile.TemporaryDirectory(prefix="weft-run-") as reports:
        os.environ[rank.REPORTS] = reports
        try:
            torchrun.run(torchrun.parse_args(options))
        except ChildFailedError as error:
            for line in _silent(error.failures, Path(reports)):
                sys.stderr.write(f"{line}\n")
            return max(error.get_first_failure()[1].exitcode, 1)
        except SignalException as error:
            return 128 + int(error.sigval)
        finally:
            logging.disable(before)
    return 0


def _silent(failures: dict[int, Any], reports: Path) -> list[str]:
    """How ranks ended that have printed nothing themselves; not those that the launcher ended."""
    said = []
    for number, failure in sorted(failures.items()):
        if not (reports / f"{number}.ended").exists() and failure.exitcode != -signal.SIGTERM:
            how = f"with exit code {failure.exitcode}"
            if failure.exitcode < 0:
                how = f"by {signal.Signals(-failure.exitcode).name}"
            said.append(f"rank {number} ended {how}")
    return said
