"""Recurrent networks and their cells: the batch may be sharded, everything else is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.rules import Call, op, page, rule
from weft.rules.call import TensorArg

__all__ = ["PAGE"]


def _recurrent(call: Call, wants_grad: Sequence[bool]) -> str | None:
    """For one layer, "t! b i!, l! b h!, {weights} -> t b o, l b h"."""
    x = call.tensors[0]
    is_random = call.get("dropout") and call.get("train")
    if is_random or len(x.shape) != 3:
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


def _layered(op: Any, num_states: int) -> Callable[..., tuple[Tensor, ...]]:
    def run(
        x: Tensor, states: Any, weights: Sequence[Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:
        """Layer by layer, with dropout between them."""
        if not (dropout and train):
            return NotImplemented
        given = states if num_states > 1 else [states]
        num, per = (2 if bidirectional else 1), len(weights) // num_layers
        left: list[tuple[Tensor, ...]] = []
        for layer in range(num_layers):
            own = [one.narrow(0, layer * num, num) for one in given]
            x, *after = op(
                x, own if num_states > 1 else own[0], weights[layer * per : (layer + 1) * per],
                has_biases, 1, 0.0, train, bidirectional, batch_first,
            )
            left.append(tuple(after))
            if layer + 1 < num_layers:
                x = torch.dropout(x, dropout, True)
        return x, *(torch.cat(each) for each in zip(*left))

    return run


_aten = torch.ops.aten

PAGE = page(
    op("lstm.input", rule(_recurrent), compose=_layered(_aten.lstm.input, 2), each_call=True),
    *[op(f"{name}.input", rule(_recurrent), each_call=True,
         compose=_layered(getattr(_aten, name).input, 1))
      for name in ("gru", "rnn_tanh", "rnn_relu")],
    # A row may come without a batch.
    op("lstm_cell", rule(
        "b i!, {b h!}, g! i!, g! h!, [g!], [g!] -> b h, b h",
        "i!, {h!}, g! i!, g! h!, [g!], [g!] -> h, h")),
    op("gru_cell rnn_tanh_cell rnn_relu_cell", rule(
        "b i!, b h!, g! i!, g! h!, [g!], [g!] -> b h",
        "i!, h!, g! i!, g! h!, [g!], [g!] -> h")),
)
