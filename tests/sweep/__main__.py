"""`python -m tests.sweep`: see `make sweep`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import click

from tests.sweep import board, modules
from tests.sweep.journal import Journal
from tests.sweep.runner import JUDGES, Job, run
from tests.sweep.samples import DTYPES, database


@click.command()
@click.argument("ops", nargs=-1)
@click.option("--system", "systems", multiple=True, type=click.Choice(list(JUDGES)),
              default=("weft",), show_default=True)
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(list(DTYPES)),
              default=tuple(DTYPES), show_default=True)
@click.option("--variant", "variants", multiple=True,
              type=click.Choice(["", "inplace", "out", "turned", *modules.VARIANTS]),
              help="Of ops all but the last three, of modules these, by default.")
@click.option("--modules", "of_modules", is_flag=True, help="torch's modules, not its operators.")
@click.option("--samples", default=6, show_default=True, help="Most samples of an op and dtype.")
@click.option("--seconds", default=1800.0, show_default=True, help="Budget of time.")
@click.option("--workers", default=os.cpu_count() or 1, show_default=True)
@click.option("--journal", default=".sweep/found.jsonl", show_default=True, type=Path)
@click.option("--fresh", is_flag=True, help="Forget what was found before.")
@click.option("--out", type=Path, help="Write the scoreboard, as Markdown.")
def main(
    ops: tuple[str, ...], systems: tuple[str, ...], dtypes: tuple[str, ...],
    variants: tuple[str, ...], of_modules: bool, samples: int, seconds: float, workers: int,
    journal: Path, fresh: bool, out: Path | None,
) -> None:
    """Run OPS of torch's database (all of them by default) on simulated ranks."""
    known = modules.modules() if of_modules else database()
    variants = variants or (modules.VARIANTS if of_modules else ("", "inplace", "out", "turned"))
    if fresh:
        journal.unlink(missing_ok=True)
    book = Journal(journal)
    unknown = [op for op in ops if op not in known]
    if unknown:
        raise click.BadParameter(f"not in the database: {', '.join(unknown)}")
    jobs = [
        Job(system, op, dtype, variant, samples)
        for system in systems for dtype in dtypes for variant in variants
        for op in (ops or known)
    ]
    book.begin(_code())
    done = book.done()
    left = run([job for job in jobs if job.key not in done], book, workers, seconds)
    found = [it for it in book.found() if it.op in (ops or known)]  # others may share the journal
    click.echo(board.scoreboard(found))
    if left:
        click.echo(f"{left} of {len(jobs)} jobs are left; run again to go on.")
    if out is not None:
        page = board.module_page if of_modules else board.page
        left_out = {job: why for job, why in book.left_out().items() if job[1] in known}
        codes = {job: code for job, code in book.codes().items() if job[1] in known}
        out.write_text(page(found, left_out, codes))


def _code() -> str:
    """The commit, with a plus where files differ from it; empty where there is none."""
    def git(*args: str) -> str:
        root = Path(__file__).parents[2]
        done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("rev-parse", "--short=9", "HEAD")
    return commit + "+" * bool(commit and git("status", "--porcelain", "src", "tests"))


if __name__ == "__main__":
    main()
