"""`weft bench links`: the network that plans are made for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from bench import networks
from bench.options import read_sizes
from weft.cli import ranks
from weft.cli.terminal import RefusedError, explained
from weft.comm.launchers import environment_of
from weft.core.parse import parse_mesh

__all__ = ["links"]


@click.command()
@click.option("--mesh", required=True, metavar="AXES", help="Axes and sizes: dp=2,tp=4.")
@click.option("--device", default="cpu", show_default=True,
              help="Where the tensors live, hence which backend: cpu (gloo), cuda (NCCL), ...")
@click.option("--sizes", default="4KiB,64KiB,512KiB,4MiB", show_default=True, callback=read_sizes,
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

    Starts the ranks of the mesh on this machine. On several, start it by torchrun, or another
    launcher: then it runs as the ranks that this has started.

    \b
    weft bench links --mesh dp=2,tp=2 --out links.json
    torchrun --nnodes 2 --nproc-per-node 8 ... --no-python weft bench links --mesh dp=2,tp=8
    """
    value = parse_mesh(mesh, None, "--mesh")
    if value.size() == 1:
        raise RefusedError(
            f"weft bench links --mesh {mesh}", f"{value} has one rank",
            "a network is measured between ranks", [mesh], "--mesh dp=2")
    asked = {"mesh": dict(zip(value.axis_names, value.axis_sizes)), "device": device,
             "sizes": sizes, "num_rounds": rounds, "node_size": node_size,
             "out": None if out is None else str(out)}
    if environment_of(os.environ):
        networks.measure(asked)
    else:
        sys.exit(ranks.run(value.size(), [networks.__file__, json.dumps(asked)]))
