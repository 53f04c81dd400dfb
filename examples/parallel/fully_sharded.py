"""Fully sharded: parameters, gradients and optimizer state are sharded over the batch's axis.

The parameters of a block are gathered while it runs, and freed after it.

    weft run -n 4 examples/parallel/fully_sharded.py
    torchrun --nproc-per-node 4 examples/parallel/fully_sharded.py
"""

from __future__ import annotations

import plain
import weft
from weft import P


def sharded(num_ranks: int) -> list[float]:
    mesh = weft.init_mesh({"fsdp": num_ranks})
    model = weft.distribute_module(plain.make(), mesh, shardings={"*": P("fsdp")})
    return plain.train(model, lambda ids: weft.distribute_tensor(ids, mesh, P("fsdp")))


if __name__ == "__main__":
    plain.beside(sharded(plain.num_ranks()), plain.alone())
