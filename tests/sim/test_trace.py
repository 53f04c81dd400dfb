"""`weft.trace`: what ran when, on which rank, as viewers read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import weft
from weft import P
from weft.comm.communicator import Communicator
from weft.transport.trace import merge_traces


def train(mesh: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    weft.distribute_module(model, mesh, shardings={"0.weight": P("x"), "1.weight": P(None, "x")})
    optimizer = torch.optim.SGD(model.parameters())
    x = weft.ones(4, 8, mesh=mesh)
    model(x).square().sum().backward()
    optimizer.step()


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def test_collectives_modules_and_steps_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    untouched = Communicator.all_reduce
    with weft.trace(path):
        weft.testing.run(train, mesh={"x": 2})
    assert Communicator.all_reduce is untouched
    events = read(path)
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "rank 0", "rank 1"]
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank]
        waits = [event for event in mine if event["ph"] == "X"]
        names = [event["name"] for event in waits]
        assert {"Sequential", "0", "1", "SGD.step", "all_reduce over x"} <= set(names)
        moved = next(event for event in waits
                     if event["args"].get("transition", "").startswith("P(sum)->"))
        assert moved["args"]["bytes received"] == 4 * 8 * 4
        assert moved["args"]["line"].startswith(__file__)
        whole = next(event for event in waits if event["name"] == "Sequential")
        part = next(event for event in waits if event["name"] == "1")
        assert whole["ts"] <= part["ts"]
        assert part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] + 1
        begun = [event["id"] for event in mine if event["ph"] == "b"]
        assert begun == [event["id"] for event in mine if event["ph"] == "e"]


def test_a_dry_run_is_laid_out_by_its_estimates(tmp_path: Path) -> None:
    path, both = tmp_path / "dry.json", tmp_path / "both.json"
    found = weft.dry_run(train, {"x": 64}, "h100", rank=3)
    found.save_trace(path)
    events = [event for event in read(path) if event["ph"] == "X"]
    assert [event["args"]["bytes received"] for event in events] == [
        event.nbytes for event in found.log.events]
    assert all(event["pid"] == 3 for event in events)
    last = events[-1]
    assert abs((last["ts"] + last["dur"]) / 1e6 - found.log.seconds) < 1e-9
    assert merge_traces([path, path], both) == 1
    assert len(read(both)) == 2 * len(events) + 2
