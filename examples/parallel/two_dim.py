"""Two dims: fully sharded over one axis of the mesh, tensor parallel over the other.

A rank has some heads and hidden units, and of these only a part; the rest is gathered over `fsdp`
for the block that runs. What is not tensor parallel is sharded over `fsdp` alone.

    weft run -n 4 examples/parallel/two_dim.py
    torchrun --nproc-per-node 4 examples/parallel/two_dim.py
"""

from __future__ import annotations

import plain
import weft
from weft import P

TABLE = {
    "token.weight": P(("tp", "fsdp")), "head.*": P(("tp", "fsdp")),
    "blocks.*.[qkv].weight": P("tp", "fsdp"), "blocks.*.out.weight": P("fsdp", "tp"),
    "blocks.*.up.weight": P("tp", "fsdp"), "blocks.*.up.bias": P(("tp", "fsdp")),
    "blocks.*.down.weight": P("fsdp", "tp"),
    "*": P("fsdp"),
}


def sharded(num_ranks: int) -> list[float]:
    mesh = weft.init_mesh({"fsdp": num_ranks // 2, "tp": 2})
    model = weft.distribute_module(plain.make(), mesh, shardings=TABLE)
    return plain.train(model, lambda ids: weft.distribute_tensor(ids, mesh, P("fsdp")))


if __name__ == "__main__":
    plain.beside(sharded(plain.num_ranks()), plain.alone())
