"""`python -m tests.soundness`: see `make soundness`."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter

import click
import torch

from tests.soundness.calls import calls_of, entries
from tests.soundness.judge import faults
from weft.rules.table import DECISIONS, RULES

Found = list[tuple[str, str, list[str]]]
"""Per call: the op, what it was called with, and its faults."""


def of_entry(job: tuple[str, int, int]) -> Found:
    """What is wrong with the calls of one entry of the database."""
    entry, most, every = job
    torch.set_num_threads(1)
    found: Found = []
    of_op: Counter[str] = Counter()
    for dtype in (torch.float64, torch.int64, torch.bool):
        calls = [call for call in calls_of(entry, dtype) if of_op[call.op] < most]
        # Those of more dims first: they have more ways.
        for call in sorted(calls, key=lambda it: -max(map(len, it.form()[1]), default=0)):
            if of_op[call.op] < most:
                of_op[call.op] += 1
                said = [str(tuple(shape)) for shape, _ in call.form()[1]]
                try:
                    found.append((call.op, " ".join(said), faults(call, every)))
                except Exception as error:
                    found.append((call.op, " ".join(said), [f"{type(error).__name__}: {error}"]))
    return found


@click.command()
@click.argument("only", nargs=-1)
@click.option("--calls", "most", default=2, show_default=True,
              help="Most calls of an op in an entry.")
@click.option("--every", default=1, show_default=True, help="Try every n-th way only.")
@click.option("--seconds", default=3600.0, show_default=True, help="Budget of time.")
@click.option("--workers", default=os.cpu_count() or 1, show_default=True)
def main(
    only: tuple[str, ...], most: int, every: int, seconds: float, workers: int
) -> None:
    """Check the rules of all ops that the entries of torch's database consist of, or of ONLY."""
    end, met, wrong = time.monotonic() + seconds, Counter[str](), 0
    jobs = [(entry, most, every) for entry in only or entries()]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for found in pool.imap_unordered(of_entry, jobs):
            for op, called, said in found:
                met[op] += 1
                wrong += bool(said)
                for text in said:
                    click.echo(f"{op}{called}: {text}")
            if time.monotonic() > end:
                click.echo("the time is over")
                break
    known = {*RULES, *DECISIONS}
    click.echo(f"{met.total()} calls of {len(met)} ops of {len(known)} with rules, {wrong} wrong")
    if not only:
        click.echo(f"never met: {', '.join(sorted(known - set(met)))}")


if __name__ == "__main__":
    main()
