"""Ragged: each rank has as many rows of the batch as it can carry; here rank r has 2r + 1 parts.

A mean is over all rows, not over the ranks' means. A rank may have no row: of 8 rows over 4 ranks
the first has none, and the last 4.

    weft run -n 4 examples/parallel/ragged.py
    torchrun --nproc-per-node 4 examples/parallel/ragged.py
"""

from __future__ import annotations

from itertools import pairwise

import plain
import weft
from weft import Shard


def shares(length: int, num_ranks: int) -> tuple[int, ...]:
    cuts = [length * rank**2 // num_ranks**2 for rank in range(num_ranks + 1)]
    return tuple(end - start for start, end in pairwise(cuts))


def sharded(num_ranks: int) -> list[float]:
    mesh = weft.init_mesh({"dp": num_ranks})
    rows = Shard(0, sizes=shares(plain.BATCH, num_ranks))
    model = weft.distribute_module(plain.make(), mesh)
    return plain.train(model, lambda ids: weft.distribute_tensor(ids, mesh, [rows]))


if __name__ == "__main__":
    plain.beside(sharded(plain.num_ranks()), plain.alone())
