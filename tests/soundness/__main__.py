"""`python -m tests.soundness`: see `make soundness`."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter

import click

from tests.soundness.calls import entries
from tests.soundness.judge import of_entry
from weft.rules.table import DECISIONS, RULES


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
