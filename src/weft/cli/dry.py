"""`weft dry`: what a script costs on any number of ranks, without them."""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from weft.cli.rank import told
from weft.cli.terminal import ScriptError, check_folder, explained
from weft.comm import BoundMesh
from weft.core import Mesh
from weft.core.parse import parse_mesh
from weft.dry import Compute, dry_classes, dry_run
from weft.dry.compute import DEVICES
from weft.planner import Links
from weft.transport.trace import trace_events, write_trace

__all__ = ["dry"]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--mesh", required=True, metavar="AXES", help="Axes and sizes: dp=64,tp=8.")
@click.option("--device", type=click.Choice(list(DEVICES)),
              help="The device whose data sheet gives links, rates and memory.")
@click.option("--links", metavar="NAME",
              help="The network of the estimated seconds: gloo, nccl, a100, h100, b200, gb200, or "
                   "a file of weft bench links. Without it that of --device, else gloo.")
@click.option("--compute", metavar="RATES", help="FLOP/s and bytes/s of a device, and seconds of a "
                                                 "call: 4e14,2e12,5e-6.")
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True,
              help="End after so many steps of the optimizer; the last one counts.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True,
              help="The rank whose step is shown.")
@click.option("--classes", is_flag=True,
              help="The ranks that are first, in the middle or last along each axis, one "
                   "for each that differs.")
@click.option("--reads", type=float, default=0.0, show_default=True,
              help="The value that the script reads where it would depend on data.")
@click.option("--collectives", is_flag=True, help="Print each collective as well.")
@click.option("--trace", type=click.Path(dir_okay=False),
              help="Write the collectives as a trace as well, for ui.perfetto.dev.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@explained
def dry(
    mesh: str, device: str | None, links: str | None, compute: str | None, steps: int, rank: int,
    classes: bool, reads: float, collectives: bool, trace: str | None, script: str,
    arguments: tuple[str, ...],
) -> None:
    """Say what a step of SCRIPT costs on a mesh of any size, without data and without other ranks.

    The script is not changed: meshes that it makes with the same axes have the sizes given here,
    and its tensors take no memory. ARGUMENTS go to the script.

    \b
    weft dry --mesh dp=64,tp=8 --device h100 train.py
    """
    if trace is not None:
        check_folder("--trace", trace)
    value: Mesh = parse_mesh(mesh, None, "--mesh")
    networks: Any = Links.load(links) if links and Path(links).is_file() else links
    if links and links == networks and Path(links).suffix:
        raise click.BadParameter(f"File {links!r} does not exist.", param_hint="--links")
    rates = None if compute is None else _rates(compute)
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    os.environ.update(WORLD_SIZE=str(value.size()), LOCAL_RANK="0")

    def program(mine: BoundMesh) -> None:
        os.environ["RANK"] = str(mine.rank)
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception as error:
            raise ScriptError(told(error)) from error
        except SystemExit as end:
            if end.code:  # sys.exit(main()) ends a script that has done its work
                raise

    options: dict[str, Any] = {
        "compute": rates, "steps": steps, "reads": reads, "device": device}
    found = (dry_classes(program, value, networks, **options) if classes
             else [dry_run(program, value, networks, rank=rank, **options)])
    made = found[0].meshes
    if made and not any(set(each.axis_names) == set(value.axis_names) for each in made):
        click.echo(f"{script} makes {', '.join(map(str, made))}, and no mesh with the axes of "
                   f"--mesh {mesh}: what follows is about its own.\n", err=True)
        if len(set(made)) == 1:
            found = [replace(one, mesh=made[0]) for one in found]
    if trace is not None:
        write_trace(trace, [each for one in found for each in trace_events(one.log, one.rank)])
    for one in found:
        click.echo(f"{one}\n{one.log}" if collectives else str(one))


def _rates(text: str) -> Compute:
    try:
        return Compute(*map(float, text.split(",")))
    except (TypeError, ValueError):
        raise click.BadParameter(
            f"{text!r} is not FLOP/s, bytes/s and seconds: 4e14,2e12,5e-6", param_hint="--compute"
        ) from None
