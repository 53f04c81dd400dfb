"""Recurrent networks and their cells: batch and sequence may be sharded, other dims are whole.

Along a sharded sequence the state goes from shard to shard: each rank runs its part when it has the
state from the part before it. The bytes sent do not depend on the length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.rules import Call, op, page, rule
from weft.rules.call import TensorArg
from weft.transport import Shards

__all__ = ["PAGE"]


def _recurrent(call: Call, wants_grad: Sequence[bool]) -> str | None:
    """For one layer, "t~ b i!, l! b h!, {weights} -> t b o, l b h"."""
    x = call.tensors[0]
    is_random = call.get("dropout") and call.get("train")
    if is_random or len(x.shape) != 3:
        return None
    at_batch = 0 if call.get("batch_first") else 1
    num_states = 2 if "lstm" in call.op else 1

    def dims(name: str, tensor: TensorArg, batch: int | None, time: str = "") -> str:
        return " ".join([
            "b" if dim == batch else time if time and dim == 1 - at_batch else f"{name}_{dim}!"
            for dim in range(len(tensor.shape))])

    given = [dims(f"x{at}", one, None if at > num_states else 1 if at else at_batch,
                  "" if at else "t~") for at, one in enumerate(call.tensors)]
    made = [dims(f"y{at}", one, 1 if at else at_batch, "" if at else "t")
            for at, one in enumerate(call.results)]
    return f"{', '.join(given)} -> {', '.join(made)}"


def _along_time(op: Any, num_states: int) -> Callable[..., tuple[Tensor, ...]]:
    def kernel(
        shards: Shards, x: Tensor, states: Any, weights: Sequence[Tensor], has_biases: bool,
        num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:
        """The state goes from shard to shard: a sum of what one rank has and the others do not."""
        given = list(states) if num_states > 1 else [states]
        ways, per = (2 if bidirectional else 1), len(weights) // num_layers
        per //= ways
        x = x.transpose(0, 1) if batch_first else x
        left: list[list[Tensor]] = []
        for layer in range(num_layers):
            made: list[Tensor] = []
            for way in range(ways):
                at = layer * ways + way
                own = weights[at * per : (at + 1) * per]

                def run(part: Tensor, before: list[Tensor], own: Any = own, way: int = way) -> Any:
                    part = part.flip(0) if way else part
                    out, *after = op(part, before if num_states > 1 else before[0], own,
                                     has_biases, 1, 0.0, train, False, False)
                    return out.flip(0) if way else out, after

                out, after = _passed(
                    shards, run, x, [one.narrow(0, at, 1) for one in given], own, bool(way))
                made.append(out)
                left.append(after)
            x = torch.cat(made, -1) if ways > 1 else made[0]
        return (x.transpose(0, 1) if batch_first else x,
                *[torch.cat(each) for each in zip(*left)])

    return kernel


def _passed(
    shards: Shards, run: Callable[..., tuple[Tensor, list[Tensor]]], x: Tensor,
    states: list[Tensor], weights: Sequence[Tensor], backwards: bool,
) -> tuple[Tensor, list[Tensor]]:
    """One layer in one direction: what it gives for this rank's part, and the last states."""
    widths = [one.shape[-1] for one in states]
    state = torch.cat(states, -1)
    nothing = shards.tie(torch.zeros_like(state), x, state, *weights)
    out = nothing.narrow(0, 0, 0).narrow(-1, 0, widths[0]).expand(0, -1, -1)
    for shard in reversed(shards.filled) if backwards else shards.filled:
        after = shards.tie(nothing, state)
        if shard == shards.index:
            out, found = run(x, [one.contiguous() for one in state.split(widths, -1)])
            after = shards.tie(torch.cat(found, -1), nothing)
        state = shards.psum(after)
    out = shards.tie(out, state, nothing)
    return out, list(state.split(widths, -1))


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
    op("lstm.input", rule(_recurrent), kernel=_along_time(_aten.lstm.input, 2),
       compose=_layered(_aten.lstm.input, 2), each_call=True),
    *[op(f"{name}.input", rule(_recurrent), each_call=True,
         kernel=_along_time(getattr(_aten, name).input, 1),
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
