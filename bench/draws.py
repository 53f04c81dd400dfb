"""Random numbers: rows, and columns of 8, of a tensor of which each rank holds 2^20 float32.

torch's DTensor draws on accelerators only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import weft
from bench import world
from bench.item import Figure, Item, Row, timed
from weft import P

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


def _measure(num_rounds: int) -> list[Row]:
    torch.manual_seed(0)
    return [_row(name, dim, num_rounds) for name in DRAWS for dim in (0, 1)]


ITEM = Item("draws", _measure)
