"""`weft bench`: the commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from weft.cli.bench import networks, table
from weft.cli.bench.measured import Measured
from weft.cli.bench.rows import ROWS
from weft.cli.launch import RanksFailed, events, is_rank
from weft.cli.terminal import RefusedError, explained
from weft.core.parse import parse_mesh
from weft.errors import message
from weft.planner import Links

__all__ = ["bench", "measured_rows"]

_PASS_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_UNITS = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class _Bench(click.Group):
    """A group whose command, where none is named, is `calls`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["calls", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Bench, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure what weft costs, here.

    Without a command: calls.
    """


@bench.command(context_settings={**_PASS_ON, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def calls(arguments: tuple[str, ...]) -> None:
    """The cost of a call, in weft's repository.

    ARGUMENTS go to `python -m bench`, which is no part of the installed package.
    """
    here = Path.cwd()
    if not (here / "bench" / "__main__.py").is_file():
        raise RefusedError(
            message("weft bench calls", f"{here} has no bench/__main__.py",
                    "the cost of a call is measured by a part of weft's repository", [str(here)],
                    "weft bench redistribute or weft bench links, which work anywhere; or "
                    "make bench, in the repository")
        )
    sys.exit(subprocess.run([sys.executable, "-m", "bench", *arguments], check=False).returncode)


def _sizes(_: Any, __: Any, text: str) -> list[int]:
    """`64KiB,1MiB` as bytes."""
    found = []
    for word in text.split(","):
        number = word.strip().upper()
        unit = next((unit for unit in _UNITS if number.endswith(unit)), "")
        try:
            found.append(int(float(number.removesuffix(unit)) * _UNITS.get(unit, 1)))
        except ValueError:
            raise click.BadParameter(f"{word!r} is no size such as 64KiB, 1MiB or 4096") from None
        if not 1 << 10 <= found[-1] <= 1 << 30:
            raise click.BadParameter(f"{word!r} is not between 1KiB and 1GiB")
    return found


@bench.command()
@click.option("--sizes", default="1MiB", show_default=True, callback=_sizes,
              help="Bytes of the whole tensor: 64KiB,1MiB,16MiB.")
@click.option("--rounds", default=11, show_default=True, type=click.IntRange(min=1),
              help="Rounds of the interleaving.")
@click.option("--row", "names", multiple=True, metavar="TEXT",
              help="Only rows whose names contain this; may be repeated.")
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False),
              help="Write all rounds as JSON.")
@explained
def redistribute(
    sizes: list[int], rounds: int, names: tuple[str, ...], path: Path | None
) -> None:
    """Bytes and time of redistribution, beside torch's.

    Starts 4 and then 8 gloo ranks on this machine. Each row is done by weft, by torch's DTensor, by
    one all_to_all_single with split sizes, and by torch's own collective where it has one, forward
    and forward with backward, in turns.
    """
    rows = [row.name for row in ROWS if not names or any(name in row.name for name in names)]
    if not rows:
        raise RefusedError(
            message("weft bench redistribute --row", f"none of {len(ROWS)} rows contains "
                    f"{', '.join(map(repr, names))}", "a row is chosen by a part of its name",
                    [row.name for row in ROWS], "--row 'S0 -> S1'")
        )
    seen: list[Measured] = []
    raw: list[dict[str, Any]] = []
    above: tuple[int, int] | None = None
    try:
        for it, event in measured_rows(rows, sizes, rounds):
            size = min(sizes, key=lambda size: abs(size - it.nbytes))
            if above != (it.num_ranks, size):
                click.echo(("\n" if seen else "") + table.header(it.num_ranks, size, rounds))
                above = (it.num_ranks, size)
            click.echo(table.line(it))
            seen.append(it)
            raw.append(event)
    except RanksFailed as failed:
        click.echo(str(failed), err=True)
        sys.exit(1)
    click.echo(f"\n{table.summary(seen)}")
    if path is not None:
        path.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
        click.echo(f"written to {path}")


def measured_rows(
    names: Sequence[str], sizes: Sequence[int], num_rounds: int
) -> Iterator[tuple[Measured, dict[str, Any]]]:
    """The rows of these names at each size, as ranks on this machine measure them.

    Raises:
        RanksFailed: one of them failed.
    """
    for num_ranks in sorted({row.mesh.size() for row in ROWS if row.name in names}):
        for size in sizes:
            asked = {"num_ranks": num_ranks, "rows": list(names), "sizes": [size],
                     "num_rounds": num_rounds}
            program = ["-m", "weft.cli.bench.ranks", json.dumps(asked)]
            for event in events(num_ranks, program):
                yield Measured.read(event), event


@bench.command()
@click.option("--mesh", required=True, metavar="AXES", help="Axes and sizes: dp=2,tp=4.")
@click.option("--device", default="cpu", show_default=True,
              help="Where the tensors live, hence which backend: cpu (gloo), cuda (NCCL), ...")
@click.option("--sizes", default="4KiB,64KiB,512KiB,4MiB", show_default=True, callback=_sizes,
              help="Bytes that a rank receives.")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(min=1),
              help="Turns of each collective, of which the best counts.")
@click.option("--node-size", default=8, show_default=True, type=click.IntRange(min=1),
              help="Devices of a node.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False),
              help="Write the links, for weft.Links.load.")
@explained
def links(
    mesh: str, device: str, sizes: list[int], rounds: int, node_size: int, out: Path | None
) -> None:
    """Latency and bandwidth of each mesh axis, for the planner.

    Starts the ranks of the mesh on this machine. On several, start it by torchrun: then it runs as
    the ranks that torchrun has started.

    \b
    weft bench links --mesh dp=2,tp=2 --out links.json
    torchrun --nnodes 2 --nproc-per-node 8 ... --no-python weft bench links --mesh dp=2,tp=8
    """
    value = parse_mesh(mesh, None, "--mesh")
    if value.size() == 1:
        raise RefusedError(
            message(f"weft bench links --mesh {mesh}", f"{value} has one rank",
                    "a network is measured between ranks", [mesh], "--mesh dp=2")
        )
    asked = {"mesh": dict(zip(value.axis_names, value.axis_sizes)), "device": device,
             "sizes": sizes, "num_rounds": rounds, "node_size": node_size}
    try:
        if is_rank():
            found = networks.measure(asked)
        else:
            program = ["-m", "weft.cli.bench.networks", json.dumps(asked)]
            (found,) = events(value.size(), program)
    except RanksFailed as failed:
        click.echo(str(failed), err=True)
        sys.exit(1)
    if found is None:  # another rank says it
        return
    measured = Links.from_json(found["links"])
    click.echo(networks.text(value, measured, found["error"]))
    if out is not None:
        measured.save(out)
        click.echo(f'written to {out}: weft.set_links(weft.Links.load("{out}"))')
