"""Starting the ranks of the demo and listening to them: what they tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.train import MESH, NUM_RANKS, Run, Step
from weft.cli.launch import RanksFailed, events
from weft.core import Layout, Mesh
from weft.core.parse import parse_layout

__all__ = ["Parameter", "RanksFailed", "Told", "Traffic", "follow"]

_RANKS = str(Path(__file__).with_name("ranks.py"))


@dataclass(frozen=True, slots=True)
class Parameter:
    """Where a parameter lives."""

    name: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind that one rank took part in during one step; bytes received."""

    axes: str
    op: str
    direction: str
    collective: str
    num_calls: int
    nbytes: int


@dataclass(slots=True)
class Told:
    """What the ranks have told so far."""

    parameters: list[Parameter] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)


def follow(run: Run, told: Told) -> Iterator[dict[str, Any]]:
    """Run the ranks; after each event of theirs, `told` has grown.

    Raises:
        RanksFailed: one of them failed, or died.
    """
    for event in events(NUM_RANKS, _RANKS, run.as_dict()):
        _take(told, event)
        yield event
    if len(told.steps) < run.num_steps:
        raise RanksFailed(f"{len(told.steps)} of {run.num_steps} steps were told")


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
