"""The commands as a user starts them, with ranks in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests import forked
from weft.cli import rank
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


MISTAKE = """
import sys, torch, weft
mesh = weft.init_mesh((int(sys.argv[1]),))
x = weft.distribute_tensor(torch.arange(8.), mesh, [weft.Shard(0)])
print(f"rank {mesh.rank}: {x.sum().item()}\\n", end="")
def program():
    return x.redistribute(placements=weft.P("dp"))
program()
"""

ONE = """
import pickle, sys, time, weft
class Here:
    pass
assert type(pickle.loads(pickle.dumps(Here()))) is Here and sys.modules["__main__"].Here is Here
assert __file__ == sys.argv[0] and __name__ == "__main__"
import beside
mesh = weft.init_mesh((2,))
mesh.comm((0,)).exchange(None)
print(f"rank {mesh.rank} runs\\n", end="", flush=True)
if mesh.rank == 1:
    {}["missing"]
mesh.comm((0,)).exchange(None)
"""

LIVE = """
import sys, time
print("first", flush=True)
print("warned", file=sys.stderr, flush=True)
time.sleep(120)
"""


def start(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "COLUMNS": "80", **environment}
    if "OMP_NUM_THREADS" not in environment:
        variables.pop("OMP_NUM_THREADS", None)
    return forked.run("weft", *command, environment=variables)


def one_rank(
    script: Path, reports: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The process of a rank that is alone, without a launcher."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return subprocess.run(
        [sys.executable, rank.__file__, str(script), *arguments], capture_output=True, text=True,
        env={**os.environ, **alone, rank.REPORTS: str(reports), **environment}, timeout=150,
        check=False)


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
    done = start("run", "-n", "2", str(script), WEFT_TIMEOUT="300")  # `start` waits for half of it
    assert done.returncode == 7
    assert "rank 1 ended with exit code 7" in done.stderr.splitlines()


def test_a_mistake_of_all_ranks_is_said_once_and_briefly(tmp_path: Path) -> None:
    script = tmp_path / "mistake.py"
    script.write_text(MISTAKE)
    done = start("run", "-n", "2", str(script), "2")
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: 28.0" for rank in range(2)]
    lines = done.stderr.splitlines()
    assert len(lines) < 15, done.stderr
    assert {*re.findall(r"\d", lines[0].split(":")[0])} <= {*"01"}
    assert lines[0].endswith(
        "Traceback (most recent call last; frames of weft and torch with WEFT_DEBUG=1):")
    frames = [line for line in lines if line.startswith("  File ")]
    assert frames == [f'  File "{script}", line 8, in <module>',
                      f'  File "{script}", line 7, in program']
    rule = next(place for place, line in enumerate(lines) if line.startswith("  Rule: "))
    assert lines[rule - 1].startswith("weft.errors.MeshError: ")
    assert [line.split(":")[0] for line in lines[rule:] if not line.startswith("rank ")] == [
        "  Rule", "  Offenders", "  Fix"]
    full = one_rank(script, tmp_path, "1", WEFT_DEBUG="1")
    assert full.returncode == 1
    assert "weft.errors.MeshError: " in full.stderr
    assert "weft/tensor/placing/redistribute.py" in full.stderr


def test_the_error_of_one_rank_stands_before_those_who_waited(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text(ONE)
    (tmp_path / "beside.py").write_text("")
    done = start("run", "-n", "2", str(script), WEFT_TIMEOUT="20")
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == ["rank 0 runs", "rank 1 runs"], done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith("rank 1: Traceback"), done.stderr
    assert lines[1:3] == [f'  File "{script}", line 12, in <module>', '    {}["missing"]']
    assert lines[3] == "KeyError: 'missing'"
    assert {*lines[4:]} <= {"rank 0 stopped waiting for the others"}


def test_an_interrupted_rank_says_where_it_was(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text("def wait():\n    raise KeyboardInterrupt\nwait()\n")  # as Ctrl-C does
    done = one_rank(script, tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [
        f'  File "{script}", line 3, in <module>', "    wait()",
        f'  File "{script}", line 2, in wait', "    raise KeyboardInterrupt", "KeyboardInterrupt"]


def test_a_script_that_cannot_be_read_says_where(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("x = 1\ny = (\n")
    done = start("run", "-n", "2", str(script))
    assert done.returncode == 1 and len(done.stderr.splitlines()) < 10
    assert f'  File "{script}", line 2' in done.stderr
    assert done.stderr.count("SyntaxError: '(' was never closed") == 1


def test_output_arrives_while_ranks_run(tmp_path: Path) -> None:
    script = tmp_path / "live.py"
    script.write_text(LIVE)
    with subprocess.Popen([*WEFT, "run", "-n", "2", str(script)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ["first\n"] * 2
        assert [process.stderr.readline(), process.stderr.readline()] == ["warned\n"] * 2
        process.terminate()
        assert process.wait(60) == 128 + 15


def test_run_refuses_a_script_that_is_not_there() -> None:
    assert "nowhere.py" in refused("run", "-n", "2", "nowhere.py")


@pytest.mark.parametrize("name", ["demo", "bench"])
def test_a_tool_that_is_not_there_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "tools", tmp_path / "examples"]
    monkeypatch.setattr(main.commands[name], "places", places)
    assert refused(name) == (
        f"weft {name}: its program is in none of 2 folders.\n"
        "  Rule: the demo and the benchmarks are no part of the library: they lie in its "
        "repository, and pip installs them from there.\n"
        f"  Offenders: {places[0] / name}, {places[1] / name}\n"
        "  Fix: pip install .  # in weft's repository\n"
    )


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
