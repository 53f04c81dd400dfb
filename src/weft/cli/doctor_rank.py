"""The work of each rank of `weft doctor`; run by its path, as a script."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import weft
from weft import P

__all__ = ["NBYTES"]

NBYTES = 1 << 22
"""Bytes of the tensor whose all-reduce is timed."""


def _seconds(mesh: Any, length: int, rounds: int = 5) -> float:
    """The median time of an all-reduce of so many float32 numbers."""
    times = []
    for _ in range(rounds):
        terms = weft.zeros(length, mesh=mesh, spec=P(partial={"x": "sum"}))
        start = time.perf_counter()
        terms.full_tensor()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _main(nbytes: int) -> None:
    mesh = weft.init_mesh({"x": int(os.environ["WORLD_SIZE"])})
    total = weft.arange(1, mesh.size() + 1, mesh=mesh, spec=P("x")).sum().item()
    small, large = _seconds(mesh, 1), _seconds(mesh, nbytes // 4)
    received = 2 * nbytes * (1 - 1 / mesh.size())
    if mesh.rank == 0:
        print(json.dumps({"sum": total, "us": small * 1e6,
                          "mb_per_second": received * 1e-6 / large}), flush=True)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
