"""Starting the ranks of the demo and listening to them."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from weft.cli.demo.events import Parameter, Traffic
from weft.cli.demo.train import MESH, NUM_RANKS, Run, Step
from weft.cli.launch import environment, launch_command
from weft.core import Mesh
from weft.core.parse import parse_layout

__all__ = ["RanksFailed", "Told", "follow"]


class RanksFailed(Exception):
    """The ranks ended with an error; the text is what they wrote."""


@dataclass(slots=True)
class Told:
    """What the ranks have told so far."""

    parameters: list[Parameter] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)


def follow(run: Run, told: Told) -> Iterator[str]:
    """Run the ranks; after each line of theirs, `told` has grown.

    Raises:
        RanksFailed: one of them failed, or died.
    """
    program = ["-m", "weft.cli.demo.ranks", json.dumps(run.as_dict())]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(launch_command(NUM_RANKS, program), env=environment(),
                         stdout=subprocess.PIPE, stderr=errors, text=True) as ranks,
    ):
        assert ranks.stdout is not None
        try:
            for line in ranks.stdout:
                _take(told, json.loads(line))
                yield line
            status = ranks.wait()
        finally:
            # Also when the user interrupts: the launcher ends its ranks when it is told to end.
            ranks.terminate()
        if status or len(told.steps) < run.num_steps:
            errors.seek(0)
            raise RanksFailed(errors.read())


def _take(told: Told, event: dict[str, Any]) -> None:
    match event:
        case {"event": "parameter", "name": name, "layout": text}:
            layout, _ = parse_layout(text, Mesh(MESH))
            told.parameters.append(Parameter(name, layout))
        case {"event": "step", "loss": loss, "seconds": seconds}:
            told.steps.append(Step(loss, seconds))
        case {"event": "traffic", "row": row}:
            told.traffic.append(Traffic(**row))
        case _:
            raise AssertionError(f"ranks tell nothing like {event}")
