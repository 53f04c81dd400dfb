"""`weft trace` runs a script as ranks, and merges what they write."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests import forked
from weft.cli import ranks
from weft.cli.trace import trace

SCRIPT = """
import sys, torch, weft
mesh = weft.init_mesh({"x": 2})
x = weft.distribute_tensor(torch.ones(4, 4), mesh, weft.P("x"))
assert sys.argv[1:] == ["--lr", "3"]
assert x.sum().item() == 16
"""


@pytest.mark.timeout(400)
def test_two_ranks_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    out = tmp_path / "run.json"
    done = forked.run(
        "weft", "trace", "-n", "2", "-o", str(out), str(tmp_path / "train.py"), "--lr", "3",
        environment=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "run.json: 2 ranks" in done.stderr
    events = json.loads(out.read_text())["traceEvents"]
    sums = [event for event in events if event["name"] == "all_reduce over x"]
    assert sorted(event["pid"] for event in sums) == [0, 1]
    assert all(event["args"]["line"].endswith("train.py:6") for event in sums)
    assert list(tmp_path.glob("*.json")) == [out]


def test_the_folder_is_looked_for_before_the_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "run", lambda *_: pytest.fail("it runs"))
    done = CliRunner().invoke(trace, ["-n", "2", "-o", "no where/a.json", __file__])
    assert done.exit_code == 2
    assert done.output.startswith("--out no where/a.json: there is no folder 'no where'.\n")


def test_a_run_without_events_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "run", lambda *_: 7)  # a script that ends before it does anything
    out = tmp_path / "run.json"
    done = CliRunner().invoke(trace, ["-n", "2", "-o", str(out), __file__])
    assert done.exit_code == 7 and not out.exists()
    assert done.output == (
        f"nothing was traced, and {out} is not written: no collective, module or step ran\n")
