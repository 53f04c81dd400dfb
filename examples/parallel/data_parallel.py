"""Data parallel: each rank has all parameters and a part of the batch; gradients are summed.

    weft run -n 4 examples/parallel/data_parallel.py
    torchrun --nproc-per-node 4 examples/parallel/data_parallel.py
"""

from __future__ import annotations

import plain
import weft
from weft import P


def sharded(num_ranks: int) -> list[float]:
    mesh = weft.init_mesh({"dp": num_ranks})
    model = weft.distribute_module(plain.make(), mesh)
    return plain.train(model, lambda ids: weft.distribute_tensor(ids, mesh, P("dp")))


if __name__ == "__main__":
    plain.beside(sharded(plain.num_ranks()), plain.alone())
