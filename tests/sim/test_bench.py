"""The benchmark runs, and what it counts (not what it times) is as promised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOST = "redistribute, host"


def run_bench(out: Path, *items: str) -> dict:
    """What `python -m bench` measures of some items in one round."""
    only = [word for item in items for word in ("--only", item)]
    command = [sys.executable, "-m", "bench", "--rounds", "1", "--json", str(out), *only]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "--only calls takes seconds" in " ".join(done.stdout.split())
    assert "figures met" not in done.stdout and "at most" not in done.stdout
    return json.loads(out.read_text(encoding="utf-8"))["items"]


def test_bench_in_miniature(tmp_path: Path) -> None:
    items = run_bench(tmp_path / "bench.json", "calls", "mlp", "block", "adamw", HOST)
    check_host_costs(items.pop(HOST))
    assert items.keys() == {"calls", "mlp", "block", "adamw"}
    assert [row["name"] for row in items["calls"]][:4] == ["add", "mm", "relu", "view"]
    for rows in items.values():
        for row in rows:
            assert {"plain", "weft"} <= set(row["times_us"]) and row["figures"]
            assert all(time > 0 for time in row["times_us"].values())
    (calls,) = [one for one in items["adamw"][0]["figures"] if one["what"] == "torch calls"]
    assert calls["met"], f"{calls['value']} torch calls, plain makes {calls['limit']}"


def check_host_costs(rows: list[dict]) -> None:
    assert {"S0 -> R", "S0 -> S1", "S0 S1 -> S1 S0"} <= {row["name"] for row in rows}
    for row in rows:
        assert set(row["times_us"]) == {"all_to_all_single", "no grad", "grad"}
        assert [figure["limit"] for figure in row["figures"]] == [60.0, 60.0]
