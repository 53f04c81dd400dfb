"""Recurrent networks with dropout between their layers: layer by layer, with drawn masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.tensor.call.random.dropout import DROPOUT

__all__ = ["RECURRENT"]


def _layered(op: Any, num_states: int) -> Callable[..., tuple[Tensor, ...]]:
    def run(
        x: Tensor, states: Any, weights: Sequence[Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:
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
                x = DROPOUT["dropout"](x, dropout, True)
        return x, *(torch.cat(each) for each in zip(*left))

    return run


_aten = torch.ops.aten

RECURRENT: dict[str, Callable[..., Any]] = {
    "lstm.input": _layered(_aten.lstm.input, 2),
    "gru.input": _layered(_aten.gru.input, 1),
    "rnn_tanh.input": _layered(_aten.rnn_tanh.input, 1),
    "rnn_relu.input": _layered(_aten.rnn_relu.input, 1),
}
"""Op -> what carries it out where it drops out."""
