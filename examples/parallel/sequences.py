"""Sequences: each rank has a stretch of every text, and nothing of the size of a whole one.

Parameters are fully sharded over the same axis. Attention alone crosses the borders of stretches.

    weft run -n 4 examples/parallel/sequences.py
    torchrun --nproc-per-node 4 examples/parallel/sequences.py
"""

from __future__ import annotations

import plain
import weft
from weft import P


def sharded(num_ranks: int) -> list[float]:
    mesh = weft.init_mesh({"seq": num_ranks})
    model = weft.distribute_module(plain.make(), mesh, shardings={"*": P("seq")})
    return plain.train(model, lambda ids: weft.distribute_tensor(ids, mesh, P(None, "seq")))


if __name__ == "__main__":
    plain.beside(sharded(plain.num_ranks()), plain.alone())
