"""`weft bench field`: sharded fields, their bytes, memory and time."""

from __future__ import annotations

from typing import Any

import click
import torch

import weft
from bench import field_ranks
from bench.by_turns import heading, lines
from bench.field_ranks import FIRST, PROGRAMS, field_of
from weft.cli.launch import events
from weft.cli.terminal import explained
from weft.testing import peak_memory

__all__ = ["counted", "field"]


@click.command()
@click.option("--size", default=1024, show_default=True, type=click.IntRange(min=16),
              help="Rows and columns of the field.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(min=1),
              help="Rounds of the interleaving.")
@explained
def field(size: int, rounds: int) -> None:
    """Bytes, memory and time of a stencil, a small U-Net and a Fourier layer; rows are sharded.

    Bytes that a rank receives in one step, and its peak of memory against its share of one
    process's, on 1, 2 and 4 simulated ranks. Then the time of a step of 2 gloo ranks on this
    machine, by weft, by gathering the field, and by torch's DTensor where it runs, beside one
    process alone.
    """
    click.echo(f"A field of {size} x {size} float32, one step\n")
    click.echo(f"{'':10}{'ranks':>6}{'bytes':>10}{'exchanges':>11}{'memory':>8}")
    for name in PROGRAMS:
        alone = _alone(name, size)
        for ranks in (1, 2, 4):
            found = weft.testing.run(lambda mesh, name=name: counted(mesh, name, size),
                                     mesh={"x": ranks})
            nbytes, exchanges, peak = (max(its) for its in zip(*found))
            click.echo(f"{name:10}{ranks:6}{nbytes:10,}{exchanges:11}{peak * ranks / alone:8.2f}")
    systems = ("one process", "weft", "gathered", "DTensor")
    click.echo("\n" + heading(systems, rounds, 10))
    asked = {"programs": list(PROGRAMS), "size": size, "rounds": rounds, "ranks": 2}
    for event in events(2, field_ranks.__file__, asked):
        click.echo(lines(event, systems, 10))


def _alone(name: str, size: int) -> int:
    """The peak of memory of one process."""
    step, make = PROGRAMS[name]
    model, given = make(), field_of(size)
    with peak_memory(model, given) as memory:
        step(model, given)
    return memory.peak


def counted(mesh: Any, name: str, size: int) -> tuple[int, int, int]:
    """Bytes that this rank receives of fields in one step, exchanges, and the peak of memory."""
    step, make = PROGRAMS[name]
    torch.manual_seed(1)
    model = weft.distribute_module(make(), mesh)
    given = weft.distribute_tensor(field_of(size), mesh, weft.P(None, None, "x"))
    for _ in range(FIRST):
        step(model, given.clone())
    given = given.clone()
    with peak_memory(model, given) as memory, weft.explain() as log:
        step(model, given)
    moved = [event.nbytes for event in log.events if event.collective != "AllReduce"]
    return sum(moved), len(moved), memory.peak
