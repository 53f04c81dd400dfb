"""`python -m tests.fuzz`: random models, tables and steps against one process."""

from __future__ import annotations

import time
import traceback
import warnings

import click

from tests.fuzz.draws import drawn
from tests.fuzz.training import check


@click.command()
@click.option("--count", default=1000, show_default=True, help="How many trials.")
@click.option("--first", default=0, show_default=True, help="The seed of the first.")
@click.option("--seconds", default=3600.0, show_default=True, help="Budget of time.")
@click.option("--full/--brief", default=False, help="Print whole tracebacks.")
def main(count: int, first: int, seconds: float, full: bool) -> None:
    """Train COUNT drawn models; print the seeds of those that fail, and what they are."""
    warnings.simplefilter("ignore")
    stop, num_failed, done = time.monotonic() + seconds, 0, 0
    for seed in range(first, first + count):
        if time.monotonic() > stop:
            break
        done += 1
        try:
            check(drawn(seed))
        except Exception as error:
            num_failed += 1
            text = traceback.format_exc() if full else str(error).strip()[:600]
            click.echo(f"seed {seed}: {type(error).__name__}: {text}\n  {drawn(seed)}")
    click.echo(f"{done} trials from seed {first} on, {num_failed} failed")
    raise SystemExit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
