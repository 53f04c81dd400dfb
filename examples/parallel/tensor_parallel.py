"""Tensor parallel: each rank has some heads and some hidden units of every block.

All ranks see the whole batch. A block sums over the ranks twice, after its attention and after its
hidden units (Shoeybi et al., 2019); the vocabulary is sharded as well.

    weft run -n 4 examples/parallel/tensor_parallel.py
    torchrun --nproc-per-node 4 examples/parallel/tensor_parallel.py
"""

from __future__ import annotations

import plain
import weft
from weft import P

TABLE = {
    "token.weight": P("tp"), "head.*": P("tp"),
    "blocks.*.[qkv].weight": P("tp"), "blocks.*.out.weight": P(None, "tp"),
    "blocks.*.up.*": P("tp"), "blocks.*.down.weight": P(None, "tp"),
}


def sharded(num_ranks: int) -> list[float]:
    mesh = weft.init_mesh({"tp": num_ranks})
    model = weft.distribute_module(plain.make(), mesh, shardings=TABLE)
    return plain.train(model, lambda ids: weft.distribute_tensor(ids, mesh, P()))


if __name__ == "__main__":
    plain.beside(sharded(plain.num_ranks()), plain.alone())
