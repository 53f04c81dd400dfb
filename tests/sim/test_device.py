"""The tier of tests on a device that is not the CPU, which needs a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_what_assumes_a_cpu() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider",
               "tests/device/tier.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
