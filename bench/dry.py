"""`weft bench dry`: seconds of steps on two gloo ranks beside those that a dry run estimates."""

from __future__ import annotations

import json
import statistics
from functools import partial

import click

import weft
from bench import dry_ranks
from weft.cli.launch import events
from weft.cli.terminal import explained

__all__ = ["dry"]


@click.command()
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(min=1),
              help="Turns of each step.")
@explained
def dry(rounds: int) -> None:
    """Seconds of training steps on 2 gloo ranks of this machine, beside a dry run's estimates.

    The ranks measure the network and how fast they compute, between the turns of the steps. The dry
    run knows no more than that. Means of all turns count: other processes disturb the steps and
    what is measured alike. The last column has the quartiles of the steps.
    """
    *steps, rates = events(2, dry_ranks.__file__, {"rounds": rounds})
    links = weft.Links.from_json(json.dumps(rates["links"]))
    compute, of_cpu = weft.Compute(**rates["compute"]), weft.Compute(**rates["cpu"])
    for what, one in (("", compute), ("of CPU time: ", of_cpu)):
        click.echo(f"{what}{one.flops_per_s / 1e9:.1f} GFLOP/s, {one.bytes_per_s / 1e9:.1f} GB/s, "
                   f"{1e6 * one.call_s:.1f} us a call")
    click.echo(f"\n{'ms':26}{'computes':>10}{'moves':>7}{'both':>8}{'mean':>8}{'off':>6}"
               f"  {'quartiles':15}{'CPU':>8}{'mean':>8}{'off':>6}")
    for step in steps:
        name, axis = step["model"], step["axis"]
        program = partial(dry_ranks.program, name=name, axis=axis)
        found, by_cpu = (weft.dry_run(program, {axis: 2}, links, compute=one)
                         for one in (compute, of_cpu))
        mean, turns = statistics.fmean(step["seconds"]), sorted(step["seconds"])
        low, high = (1e3 * turns[len(turns) * part // 4] for part in (1, 3))
        due, cpu = by_cpu.compute_seconds or 0.0, statistics.fmean(step["cpu_seconds"])
        click.echo(
            f"{name + ', ' + dry_ranks.AXES[axis]:26}{1e3 * (found.compute_seconds or 0.0):10.1f}"
            f"{1e3 * found.seconds:7.1f}{1e3 * found.step_seconds:8.1f}{1e3 * mean:8.1f}"
            f"{found.step_seconds / mean - 1:+6.0%}  {f'{low:.0f}-{high:.0f}':15}"
            f"{1e3 * due:8.1f}{1e3 * cpu:8.1f}{due / cpu - 1:+6.0%}")
