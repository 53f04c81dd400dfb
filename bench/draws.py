"""Random numbers: rows, columns of 8 and single columns of which each rank holds 2^20 float32.

torch's DTensor draws on accelerators only. The single columns are those of 8 and 64 ranks, more
than the bench has: what one of them draws, less the 25 to 50 us of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import weft
from bench import world
from bench.timing import Figure, Row, timed
from weft import P
from weft.rng import Source, samples

LOCAL, COLUMNS = 1 << 20, 8
ROWS_TO_PLAIN, COLUMNS_TO_PLAIN = 2.0, 5.0

DRAWS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rand": (torch.rand, weft.rand), "randn": (torch.randn, weft.randn),
}
"""torch's and weft's."""


def _row(name: str, dim: int, num_rounds: int) -> Row:
    plain, ours = DRAWS[name]
    width = COLUMNS if dim else LOCAL // 1024
    local = (LOCAL // width, width)
    shape = [*local]
    shape[dim] *= world.NUM_RANKS
    limit = COLUMNS_TO_PLAIN if dim else ROWS_TO_PLAIN
    return timed(
        f"{name}, {'columns' if dim else 'rows'} cut",
        {
            "plain": lambda: plain(local),
            "weft": lambda: ours(*shape, mesh=world.weft_line(), spec=P(*[None] * dim, "dp")),
        },
        num_rounds,
        lambda times: [Figure("to plain", times.ratio("weft", "plain"), limit)],
    )


def _single(name: str, width: int, num_rounds: int) -> Row:
    plain, sample = DRAWS[name][0], {"rand": samples.unit, "randn": samples.normal}[name]
    source = Source((0, 0), (LOCAL, width), ((0, LOCAL), (3, 4)), torch.device("cpu"))
    return timed(
        f"{name}, 1 column of {width}",
        {"plain": lambda: plain(LOCAL, 1), "weft": lambda: sample(source, torch.float32)},
        num_rounds,
        lambda times: [Figure("to plain", times.ratio("weft", "plain"), COLUMNS_TO_PLAIN)],
    )


def measure(num_rounds: int) -> list[Row]:
    torch.manual_seed(0)
    rows = [_row(name, dim, num_rounds) for name in DRAWS for dim in (0, 1)]
    return [*rows, *[_single(name, width, num_rounds) for name in DRAWS for width in (8, 64)]]
