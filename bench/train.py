"""`weft bench train`: sharded training, its bytes, memory and time beside torch's own tools."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from bench.timing import Figure
from bench.training.counting import count
from bench.training.models import MODELS, Shape
from bench.training.systems import WAYS
from weft.cli.launch import events
from weft.cli.terminal import explained

__all__ = ["train"]

_RANKS = str(Path(__file__).parent / "training" / "ranks.py")

LIMITS = {
    "DDP": {"bytes": 1.0, "memory": 1.0, "step": 1.05},
    "FSDP2": {"bytes": 1.0, "memory": 1.02, "step": 1.05, "clip_grad_norm_": 1.2},
    "DTensor": {"step": 1 / 1.3},
    "DTensor, sequences": {"step": 1 / 1.5},
    "plain": {"AdamW": 1.1},
}
"""What weft takes at most, as a multiple of what the other does. `plain`: an optimizer whose
parameters are plain tensors."""

_PARTS = {"data": ["step", "AdamW"], "fully sharded": ["step", "clip_grad_norm_", "AdamW"]}
"""What is timed of a way; of others a whole step alone."""


@click.command()
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), help="These alone.")
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)),
              help="These alone.")
@click.option("--layers", default=4, show_default=True, type=click.IntRange(min=1))
@click.option("--width", default=128, show_default=True, type=click.IntRange(min=64),
              help="Features of a token, a multiple of 64.")
@click.option("--rounds", default=11, show_default=True, type=click.IntRange(min=0),
              help="Rounds of the interleaving; 0 only counts.")
@click.option("--ranks", "counted", multiple=True, type=click.IntRange(min=2),
              help="Count on so many ranks.  [default: 4; with --full 4 and 8]")
@click.option("--processes", default=2, show_default=True, type=click.IntRange(min=2),
              help="Gloo ranks of the times.")
@click.option("--full", is_flag=True,
              help="8 and 24 layers on 4 and 8 ranks, times with checkpoints, too.")
@explained
def train(
    ways: tuple[str, ...], models: tuple[str, ...], layers: int, width: int, rounds: int,
    counted: tuple[int, ...], processes: int, full: bool,
) -> None:
    """Bytes, memory and time of training steps, beside DDP, FSDP2, DTensor and code by hand.

    First one step, with and without activation checkpoints, on rank 0: bytes that it receives,
    collectives, and the peak of tensor memory with parameters and optimizer state. All systems run
    on torch's "fake" backend for that, which moves nothing. Then times on gloo ranks of this
    machine: weft's as a multiple of the other's, median of the rounds and quartiles, and the same
    of CPU time.
    """
    torch.set_num_threads(1)
    chosen, kinds = ways or tuple(WAYS), models or tuple(MODELS)
    shapes = [Shape(number, width, checkpoints=checkpoints)
              for number in ((8, 24) if full else (layers,)) for checkpoints in (False, True)]
    met: list[bool] = []
    click.echo(f"One step, rank 0: {shapes[0].batch} x {shapes[0].length} tokens, width {width}\n")
    click.echo(f"{'':76}{'bytes':>12}{'collectives':>13}{'memory':>13}  to reach")
    for way in chosen:
        for model in kinds:
            for ranks in counted or ((4, 8) if full else (4,)):
                for shape in shapes:
                    met += _counts(way, model, ranks, shape)
    if rounds:
        timed = shapes if full else shapes[:1]
        click.echo(f"\nOn {processes} gloo ranks, medians of {rounds} rounds\n")
        click.echo(f"{'':76}{'ms':>8}{'weft to it':>12}{'quartiles':>13}{'CPU':>6}  to reach")
        met += _times(chosen, kinds, timed, rounds, processes)
    click.echo(f"\n{sum(met)} of {len(met)} figures met")


def _counts(way: str, model: str, ranks: int, shape: Shape) -> Iterator[bool]:
    label, least = f"{_label(way, model, shape)}, {ranks} ranks", WAYS[way].width_for(model, ranks)
    if shape.width < least:
        click.echo(f"{label:58} less than a head for each rank: --width {least}")
        return
    found: dict[str, Mapping[str, int]] = {}
    for system in WAYS[way].systems:
        try:
            found[system] = count(system, way, model, ranks, shape)
        except KeyError:
            continue
    for system, one in found.items():
        limits = {} if system == "weft" else LIMITS.get(_named(system, way), {})
        figures = [Figure(what, found["weft"][what] / one[what], limits[what])
                   for what in ("bytes", "memory") if what in limits]
        click.echo(f"{label:58} {system:17}{one['bytes']:12,}{one['collectives']:13}"
                   f"{one['memory']:13,}  {_text(figures)}".rstrip())
        for figure in figures:
            yield figure.value <= figure.limit + 5e-4  # a loss's bytes


def _times(
    ways: tuple[str, ...], models: tuple[str, ...], shapes: list[Shape], rounds: int, ranks: int
) -> Iterator[bool]:
    cases = [(way, model, asdict(shape), part) for way in ways for model in models
             for shape in shapes for part in _PARTS.get(way, ["step"])]
    asked = {"ranks": ranks, "rounds": rounds, "cases": cases}
    for event, (_, _, shape, _) in zip(events(ranks, _RANKS, asked), cases):
        yield from _timed(event, Shape(**shape))


def _timed(event: Mapping[str, Any], shape: Shape) -> Iterator[bool]:
    way, part, times = event["way"], event["part"], event["times"]
    label = f"{_label(way, event['model'], shape)}, {part}"
    for system, clocks in times.items():
        milliseconds = 1e3 * statistics.median(clocks["seconds"])
        line = f"{label:58} {system:17}{milliseconds:8.1f}"
        if system == "weft":
            click.echo(line)
            continue
        ratios = sorted(_ratios(times, system, "seconds"))
        ratio, quarter = statistics.median(ratios), len(ratios) // 4
        cpu = statistics.median(_ratios(times, system, "cpu_seconds"))
        spread = f"{ratios[quarter]:.2f}-{ratios[-1 - quarter]:.2f}"
        known = "plain" if part == "AdamW" and system == "by hand" else _named(system, way)
        limit = LIMITS.get(known, {}).get(part)
        figures = [] if limit is None else [Figure("time", ratio, limit)]
        click.echo(f"{line}{ratio:12.2f}{spread:>13}{cpu:6.2f}  {_text(figures)}".rstrip())
        for figure in figures:
            yield figure.is_met


def _ratios(times: Mapping[str, Any], system: str, clock: str) -> list[float]:
    pairs = zip(times["weft"][clock], times[system][clock])
    return [mine / other for mine, other in pairs]


def _named(system: str, way: str) -> str:
    return f"{system}, sequences" if way == "sequences" else system


def _label(way: str, model: str, shape: Shape) -> str:
    checkpoints = ", checkpoints" if shape.checkpoints else ""
    return f"{way}, {model} x {shape.layers}{checkpoints}"


def _text(figures: list[Figure]) -> str:
    return "; ".join(
        f"{one.what} {one.value:.3f} of it, at most {one.limit:.2f}" for one in figures)
