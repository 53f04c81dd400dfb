"""Recurrent networks and their cells: the batch may be sharded, everything else is whole."""

from __future__ import annotations

from collections.abc import Sequence

from weft.rules import Call, op, page, rule
from weft.rules.call import TensorArg

__all__ = ["PAGE"]


def _recurrent(call: Call, wants_grad: Sequence[bool]) -> str | None:
    """For one layer, "t! b i!, l! b h!, {weights} -> t b o, l b h". Dropout is drawn elsewhere;
    packed sequences stay whole."""
    x = call.tensors[0]
    is_random = call.get("dropout") and call.get("train")
    if is_random or not call.op.endswith(".input") or len(x.shape) != 3:
        return None
    at_batch = 0 if call.get("batch_first") else 1
    num_states = 2 if "lstm" in call.op else 1

    def dims(name: str, tensor: TensorArg, batch: int | None) -> str:
        return " ".join(["b" if dim == batch else f"{name}_{dim}!"
                         for dim in range(len(tensor.shape))])

    given = [dims(f"x{at}", one, None if at > num_states else 1 if at else at_batch)
             for at, one in enumerate(call.tensors)]
    made = [dims(f"y{at}", one, 1 if at else at_batch) for at, one in enumerate(call.results)]
    return f"{', '.join(given)} -> {', '.join(made)}"


PAGE = page(
    op("lstm gru rnn_tanh rnn_relu", rule(_recurrent)),
    # A row may come without a batch.
    op("lstm_cell", rule(
        "b i!, {b h!}, g! i!, g! h!, [g!], [g!] -> b h, b h",
        "i!, {h!}, g! i!, g! h!, [g!], [g!] -> h, h")),
    op("gru_cell rnn_tanh_cell rnn_relu_cell", rule(
        "b i!, b h!, g! i!, g! h!, [g!], [g!] -> b h",
        "i!, h!, g! i!, g! h!, [g!], [g!] -> h")),
)
