"""`python -m tests.soundness`: see `make soundness`."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from multiprocessing.pool import IMapIterator
from pathlib import Path

import click

from tests.soundness.calls import entries
from tests.soundness.journal import Checked, Journal
from tests.soundness.judge import of_entry
from weft.ops import BOOK
from weft.rules.factors import packet


@click.command()
@click.argument("only", nargs=-1)
@click.option("--calls", "most", default=2, show_default=True,
              help="Most calls of an op in an entry.")
@click.option("--every", default=1, show_default=True, help="Try every n-th way only.")
@click.option("--seconds", default=3600.0, show_default=True, help="Budget of time.")
@click.option("--workers", default=os.cpu_count() or 1, show_default=True)
@click.option("--journal", default=".sweep/sound.jsonl", show_default=True, type=Path)
@click.option("--fresh", is_flag=True, help="Forget what was found before.")
def main(
    only: tuple[str, ...], most: int, every: int, seconds: float, workers: int,
    journal: Path, fresh: bool,
) -> None:
    """Check the rules of all ops that the entries of torch's database consist of, or of ONLY."""
    if fresh:
        journal.unlink(missing_ok=True)
    book, end = Journal(journal), time.monotonic() + seconds
    wanted = only or tuple(entries())
    done = {it.entry for it in book.checked() if (it.most, it.every) == (most, every)}
    jobs = [(entry, most, every) for entry in wanted if entry not in done]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        found = pool.imap_unordered(of_entry, jobs)
        while (one := _next(found, end)) is not None:
            book.add(one)
    checked = [it for it in book.checked()
               if it.entry in wanted and (it.most, it.every) == (most, every)]
    _report(checked, known=set(map(packet, BOOK)), all_of_them=not only)
    left = len(wanted) - len(checked)
    if left:
        click.echo(f"the time is over; {left} of {len(wanted)} entries are left: run again")


def _next(found: IMapIterator[Checked], end: float) -> Checked | None:
    """What one more entry came to; None when none is left, or the time is over."""
    try:
        return found.next(timeout=max(end - time.monotonic(), 0.01))
    except (StopIteration, multiprocessing.TimeoutError):
        return None


def _report(checked: list[Checked], known: set[str], all_of_them: bool) -> None:
    met, wrong, ways = Counter[str](), 0, 0
    for it in checked:
        for op, called, num_ways, said in it.calls:
            met[op] += 1
            ways += num_ways
            wrong += bool(said)
            for text in said:
                click.echo(f"{it.entry}: {op}{called}: {text}")
    click.echo(f"{met.total()} calls of {len(met)} ops of {len(known)} with rules in {ways} ways, "
               f"{wrong} wrong")
    if all_of_them:
        click.echo(f"never met: {', '.join(sorted(known - set(met)))}")


if __name__ == "__main__":
    main()
