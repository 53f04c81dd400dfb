"""`weft bench reshard`: the plan of a whole state, of a mixture of experts with 235 billion
parameters in 36,945 tensors. Nothing is allocated or sent: a plan is arithmetic."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache

import click

from weft.cli.terminal import explained
from weft.core import Layout, Mesh, P
from weft.planner.moving import Move, moving

__all__ = ["cases", "reshard"]

HIDDEN, INNER, VOCABULARY, EXPERTS, LAYERS = 4096, 1536, 151_936, 128, 94
"""Of Qwen3-235B-A22B."""

Shape = tuple[int, ...]


def tensors(num_layers: int = LAYERS) -> Iterator[tuple[str, Shape]]:
    """Name and shape of each parameter."""
    yield from (("embedding", (VOCABULARY, HIDDEN)), ("head", (VOCABULARY, HIDDEN)))
    yield "norm", (HIDDEN,)
    for layer in range(num_layers):
        yield from ((f"{layer}.q", (8192, HIDDEN)), (f"{layer}.o.row", (HIDDEN, 8192)))
        yield from ((f"{layer}.{name}", (512, HIDDEN)) for name in "kv")
        yield from ((f"{layer}.{name}", (128,)) for name in ("q_norm", "k_norm"))
        yield from ((f"{layer}.{name}", (HIDDEN,)) for name in ("norm_1", "norm_2"))
        yield f"{layer}.router", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            at = f"{layer}.expert.{expert}"
            yield from ((f"{at}.{name}", (INNER, HIDDEN)) for name in ("up", "gate"))
            yield f"{at}.row", (HIDDEN, INNER)


@cache
def layout(mesh: Mesh, shape: Shape, spec: P) -> Layout:
    return Layout(mesh, shape, spec)


def fully_sharded(name: str, shape: Shape) -> P:
    """Tensor parallel, and over dp."""
    if len(shape) == 1:
        return P("dp")
    return P("dp", "tp") if name.endswith("row") else P(("tp", "dp"))


def tensor_parallel(name: str, shape: Shape) -> P:
    if len(shape) == 1:
        return P()
    return P(None, "tp") if name.endswith("row") else P("tp")


def cases(num_ranks: int, num_layers: int = LAYERS) -> dict[str, list[Move]]:
    """From a trainer on the first ranks to the same ranks, to others, and expert by expert."""
    trainer = Mesh({"dp": num_ranks // 8, "tp": 8})
    here = Mesh({"copies": num_ranks // 4, "tp": 4})
    there = Mesh({"tp": num_ranks // 2}, range(num_ranks, num_ranks + num_ranks // 2))
    groups = num_ranks // 8
    old = [Mesh({"dp": 2, "tp": 4}, range(8 * at, 8 * at + 8)) for at in range(groups)]
    new = [Mesh({"tp": 4}, range(num_ranks + 4 * at, num_ranks + 4 * at + 4))
           for at in range(groups)]

    def moves(target: Mesh) -> list[Move]:
        return [
            Move(layout(trainer, shape, fully_sharded(name, shape)),
                 layout(target, shape, tensor_parallel(name, shape)), "bfloat16")
            for name, shape in tensors(num_layers)
        ]

    def by_expert(name: str, shape: Shape) -> Move:
        spec = tensor_parallel(name, shape)
        ends: tuple[Mesh, Mesh] = trainer, there
        if ".expert." in name:
            number = int(name.split(".")[2])
            ends = old[number % groups], new[number * groups // EXPERTS]
        return Move(layout(ends[0], shape, spec), layout(ends[1], shape, spec), "bfloat16")

    return {
        "fully sharded x tensor parallel to tensor parallel, other ranks": moves(there),
        "fully sharded x tensor parallel to replicas, the same ranks": moves(here),
        "experts to experts": [by_expert(*one) for one in tensors(num_layers)],
    }


def line(name: str, moves: list[Move], clock: Callable[[], float] = time.process_time) -> str:
    """The figures of one plan."""
    start = clock()
    plan = moving(moves)
    seconds = clock() - start
    received, sent = sum(plan.bytes_received.values()), plan.bytes_sent
    holders = {rank for one in dict.fromkeys(move.src.mesh for move in moves)
               for rank in map(one.rank_at, range(one.size()))}
    share = max(sent.values()) * len(holders) / max(sum(sent.values()), 1)
    return (
        f"{name}: {len(moves):,} tensors, {seconds:.1f} s of CPU, {len(plan.buckets):,} buckets, "
        f"{received / 1e9:,.0f} GB received, {received / plan.lower_bound:.3f} of the bound, "
        f"busiest sender {share:.3f} of the mean")


@click.command()
@click.option("--ranks", default=64, show_default=True, type=click.IntRange(min=16),
              help="Ranks of the trainer, a multiple of 16.")
@explained
def reshard(ranks: int) -> None:
    """Time, memory and bytes of the plan of a large state."""
    for name, moves in cases(ranks).items():
        click.echo(line(name, moves))
    unit = 1e6 if sys.platform != "darwin" else 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    click.echo(f"peak memory of this process: {peak:.2f} GB")
