"""`weft bench attention`: attention over a sharded sequence, its bytes, memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import torch
from torch import Tensor

import weft
from bench import attention_ranks
from bench.attention_ranks import PROGRAMS, SYSTEMS, Program
from bench.by_turns import heading, lines
from weft.cli.launch import events
from weft.cli.terminal import explained
from weft.testing import peak_memory

__all__ = ["attention"]


@click.command()
@click.option("--length", default=2048, show_default=True, type=click.IntRange(min=16),
              help="Tokens of the sequence.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(min=1),
              help="Rounds of the interleaving.")
@explained
def attention(length: int, rounds: int) -> None:
    """Bytes, memory and time of attention over a sharded sequence, forward and backward.

    Bytes that the busiest rank receives, and its peak of memory against its share of one process's,
    on 1, 2 and 4 simulated ranks. Then the time on 2 gloo ranks on this machine, by weft, in
    zig-zag order, with gathered keys and values, and by torch's DTensor where it runs, beside one
    process alone. DTensor has no gradient of fused attention on CPUs, so it takes plain products.
    """
    click.echo(f"{length} tokens, heads of 64 features, float32\n")
    click.echo(f"{'':22}{'ranks':>6}{'bytes':>12}{'memory':>8}")
    for name, program in PROGRAMS.items():
        alone, _ = _counted(program.operands(length), program.attend)
        for ranks in (1, 2, 4):
            found = weft.testing.run(lambda mesh, it=program: _on_rank(mesh, it, length),
                                     mesh={"x": ranks})
            peak, nbytes = (max(its) for its in zip(*found))
            click.echo(f"{name:22}{ranks:6}{nbytes:12,}{peak * ranks / alone:8.2f}")
    click.echo("\n" + heading(SYSTEMS, rounds, 22))
    for event in events(2, attention_ranks.__file__, {"length": length, "rounds": rounds}):
        click.echo(lines(event, SYSTEMS, 22))


def _on_rank(mesh: Any, program: Program, length: int) -> tuple[int, int]:
    torch.manual_seed(0)
    given = [weft.distribute_tensor(one, mesh, weft.P(None, None, "x"))
             for one in program.operands(length)]
    return _counted(given, program.attend)


def _counted(given: Sequence[Tensor], attend: Any) -> tuple[int, int]:
    """The peak of memory, and the bytes that this rank receives."""
    given = [one.detach().requires_grad_() for one in given]
    with weft.explain() as log, peak_memory(given) as memory:
        out = attend(*given)
        (out * out).sum().backward()
    return memory.peak, log.nbytes
