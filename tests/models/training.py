"""Training a model on plain tensors and on a mesh, and what came out of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import weft
from tests.models.catalogue import MODELS
from weft import P, ShardTensor

__all__ = ["WAYS", "Outcome", "Way", "compare", "distributed", "on_mesh", "plain"]


@dataclass(frozen=True, slots=True)
class Way:
    """How a model lies on a mesh: axes, what cuts the batch, and what the stream comes to."""

    mesh: Mapping[str, int]
    batch: P
    stream: P | None = None

    @property
    def has_shardings(self) -> bool:
        return "tp" in self.mesh


WAYS = {
    "dp": Way({"dp": 4}, P("dp")),
    "tp": Way({"tp": 4}, P()),
    "dp x tp": Way({"dp": 2, "tp": 2}, P("dp")),
    "tp with sequences": Way({"dp": 2, "tp": 2}, P("dp"), P("dp", "tp")),
    "one rank": Way({"dp": 1, "tp": 1}, P("dp")),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The losses of all steps, and the gradients of the first by name of the parameter."""

    losses: list[float]
    gradients: dict[str, Tensor]


def distributed(mesh: Any, way: Way, name: str, size: str, attention: str, dropout: float) -> Any:
    """The model and its inputs on a mesh."""
    model = MODELS[name].make(size, attention, dropout)
    shardings = dict(MODELS[name].shardings) if way.has_shardings else {}
    activations = {} if way.stream is None else {MODELS[name].stream: way.stream}
    weft.distribute_module(model, mesh, shardings=shardings, activations=activations)
    inputs = MODELS[name].inputs(size)
    return model, {
        each: weft.distribute_tensor(tensor, mesh, way.batch) for each, tensor in inputs.items()
    }


def _train(model: nn.Module, inputs: Mapping[str, Tensor], num_steps: int) -> Outcome:
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], {}
    for step in range(num_steps):
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = {
                name: _full(each.grad) for name, each in model.named_parameters()
                if each.grad is not None
            }
        optimizer.step()
        losses.append(loss.item())
    return Outcome(losses, gradients)


def _full(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, ShardTensor) else grad.clone()


def plain(name: str, size: str, attention: str, num_steps: int) -> Outcome:
    """Without dropout, in this process."""
    model = MODELS[name].make(size, attention)
    return _train(model, MODELS[name].inputs(size), num_steps)


def on_mesh(
    mesh: Any, way: str, name: str, size: str, attention: str, num_steps: int,
    dropout: float = 0.0,
) -> Outcome:
    """As one rank of the mesh runs it."""
    model, inputs = distributed(mesh, WAYS[way], name, size, attention, dropout)
    return _train(model, inputs, num_steps)


def compare(mine: Outcome, expected: Outcome) -> None:
    """Gradients within 1e-5 of the largest, losses within 1e-4.

    The largest is that of the parameter's own gradient, or a thousandth of the model's, whichever
    is more: some gradients are zero but for rounding (of biases of keys, which softmax drops).
    """
    assert mine.gradients.keys() == expected.gradients.keys()
    most = max(each.abs().max().item() for each in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        bound = 1e-5 * max(gradient.abs().max().item(), most / 1000)
        apart = (mine.gradients[name] - gradient).abs().max().item()
        assert apart <= bound, f"{name}: {apart:.2g} apart, {bound:.2g} allowed"
    assert len(mine.losses) == len(expected.losses)
    assert all(map(math.isfinite, mine.losses))
    apart = max(abs(one - other) for one, other in zip(mine.losses, expected.losses))
    assert apart <= 1e-4, f"losses are {apart:.2g} apart"
    assert expected.losses[-1] < expected.losses[0]
