"""The commands as a user starts them, each in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from weft.cli.main import main

WEFT = [sys.executable, "-m", "weft"]

SCRIPT = """
import os, sys, torch, weft
from weft import P
mesh = weft.init_mesh({"dp": 1, "tp": 2})
x = weft.distribute_tensor(torch.arange(15.).reshape(5, 3), mesh, P("dp", "tp"))
total = x.sum().item()
print(f"rank {mesh.rank} {mesh.here} {total} {sys.argv[1:]} {torch.get_num_threads()}\\n", end="")
"""

DYING = """
import os, torch, weft
mesh = weft.init_mesh((2,))
if mesh.rank == 1:
    os._exit(7)
weft.distribute_tensor(torch.ones(4), mesh, [weft.Shard(0)]).sum().item()
"""


def start(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "COLUMNS": "80", **environment}
    if "OMP_NUM_THREADS" not in environment:
        variables.pop("OMP_NUM_THREADS", None)
    return subprocess.run(
        [*WEFT, *command], env=variables, capture_output=True, text=True, timeout=150, check=False
    )


def refused(*command: str) -> str:
    """What a command says that starts nothing, run in this process."""
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2 and not done.stdout, done.output
    return done.stderr


def test_run_starts_a_script_on_local_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = start("run", "-n", "2", str(script), "-n", "7", "--flag")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} {(0, rank)} 105.0 ['-n', '7', '--flag'] 1" for rank in range(2)
    ]


def test_a_rank_that_dies_ends_the_run_with_an_error(tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    begin = time.monotonic()
    done = start("run", "-n", "2", str(script), WEFT_TIMEOUT="20")
    assert done.returncode != 0
    assert "exitcode  : 7" in done.stderr and "rank      : 1" in done.stderr
    assert time.monotonic() - begin < 100


def test_run_refuses_a_script_that_is_not_there() -> None:
    assert "nowhere.py" in refused("run", "-n", "2", "nowhere.py")


def test_bench_is_found_only_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "has no bench/__main__.py" in " ".join(refused("bench").split())


def test_the_demo_agrees_and_shows_what_it_promises(tmp_path: Path) -> None:
    done = start("demo", "--steps", "3", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in (
        "one model over four ranks", "one process", "four ranks", "3/3", "tokens/s",
        "80@tp{48,32}", "whole on every rank", "Loss of every step", "layer_norm", "agreement",
        "yes",
    ):
        assert shown in done.stdout, f"{shown!r} is not in\n{done.stdout}"
    *screen, path = done.stdout.splitlines()
    assert max(map(len, screen)) <= 80
    assert str(tmp_path) in path
    assert "…" not in done.stdout  # nothing was cut off
    assert (tmp_path / "demo-loss.png").read_bytes().startswith(b"\x89PNG")
