"""The host's share of a small cached redistribute: what it adds to the bare collective.

The collective is torch's own call on buffers that are ready; what needs none costs less than it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import weft
from bench import world
from bench.timing import Figure, Row, timed
from weft import Layout, P, ShardTensor

SIDE = 16
OVER_COLLECTIVE_US = 60.0

ROWS: dict[str, tuple[P, P]] = {
    "S0 -> R": (P("dp"), P()),
    "S1 -> R": (P(None, "dp"), P()),
    "S0 -> S1": (P("dp"), P(None, "dp")),
    "R -> S0": (P(), P("dp")),
    "P -> R": (P(partial={"dp": "sum"}), P()),
    "P -> S0": (P(partial={"dp": "sum"}), P("dp")),
}
ROWS_2D: dict[str, tuple[P, P]] = {
    "S0 S1 -> S1 S0": (P("dp", "tp"), P("tp", "dp")),
    "S0 S0 -> S1 S1": (P(("dp", "tp")), P(None, ("dp", "tp"))),
    "S0 R -> R S0": (P("dp"), P("tp")),
}


def _exchange() -> Callable[[], object]:
    """One all_to_all_single with split sizes, as torch's users call it."""
    x, out = torch.randn(64), torch.empty(64)
    splits = [16] * world.NUM_RANKS
    return lambda: dist.all_to_all_single(out, x, splits, splits)


def _call(mesh: weft.BoundMesh, src: P, dst: P, grad: bool) -> Callable[[], object]:
    layout = Layout(mesh, (SIDE, SIDE), src)
    local = torch.randn(layout.local_shape(0))
    x = ShardTensor.from_local(local, mesh, layout).requires_grad_(grad)
    target = Layout(mesh, (SIDE, SIDE), dst).placements
    if grad:
        return lambda: x.redistribute(placements=target)

    def run() -> object:
        with torch.no_grad():
            return x.redistribute(placements=target)

    return run


def _row(name: str, mesh: weft.BoundMesh, src: P, dst: P, num_rounds: int) -> Row:
    systems = {
        "all_to_all_single": _exchange(),
        "no grad": _call(mesh, src, dst, False),
        "grad": _call(mesh, src, dst, True),
    }
    return timed(name, systems, num_rounds, lambda times: [
        Figure(f"{what}, over the collective", times.over(what, "all_to_all_single"),
               OVER_COLLECTIVE_US, "µs")
        for what in ("no grad", "grad")
    ])


def measure(num_rounds: int) -> list[Row]:
    rows = [_row(name, world.weft_line(), *row, num_rounds) for name, row in ROWS.items()]
    mesh = world.weft_mesh()
    return rows + [_row(name, mesh, *row, num_rounds) for name, row in ROWS_2D.items()]
