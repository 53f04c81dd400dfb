"""`weft trace`: a script run as ranks of this machine, and when its collectives and modules ran."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from weft.cli import ranks
from weft.cli.terminal import check_folder
from weft.transport.trace import merge_traces

__all__ = ["trace"]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--num-ranks", type=click.IntRange(min=1), required=True,
              help="How many ranks to start on this machine.")
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False),
              default=Path("trace.json"), show_default=True, help="The file to write.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def trace(num_ranks: int, out: Path, script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT as ranks, as `weft run` does, and write when collectives and modules ran.

    ARGUMENTS go to the script. The file is for ui.perfetto.dev or chrome://tracing. A script that
    simulates its ranks is run with -n 1.
    """
    check_folder("--out", str(out))
    program = str(Path(__file__).with_name("trace_rank.py"))
    with tempfile.TemporaryDirectory(prefix="weft-trace-") as folder:
        target = Path(folder) / "trace.json"
        status = ranks.run(num_ranks, [program, str(target), script, *arguments])
        count = merge_traces(sorted(Path(folder).glob("*.json")), out)
    said = f"{out}: {count} ranks; open it at ui.perfetto.dev"
    if not count:
        said = f"nothing was traced, and {out} is not written: no collective, module or step ran"
    click.echo(said, err=True)
    sys.exit(status)
