"""A linear of three dims: batch and sequence stay cut as they are, and nothing is flattened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft import ShardTensor
from weft.spmd import mark_sharding

MESH = {"data": 2, "seq": 2, "model": 2}
X = torch.linspace(-1, 1, 5 * 7 * 6, dtype=torch.float64).view(5, 7, 6)


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 4).double()


@pytest.mark.parametrize("as_module", [True, False])
@pytest.mark.parametrize("cut", [None, "out"])
def test_batch_and_sequence_stay_cut(as_module: bool, cut: str | None) -> None:
    """Also with the weight's outputs cut over a third axis. Forward moves nothing; backward sums
    the gradients of weight and bias, and nothing else."""

    def on_rank(mesh: Any) -> tuple[list[Any], Tensor, set[str], list[Tensor]]:
        linear = layer()
        if cut:
            mark_sharding(linear.weight, mesh, ("model",))
            mark_sharding(linear.bias, mesh, ("model",))
        x = mark_sharding(X, mesh, ("data", "seq")).detach().requires_grad_()
        with weft.explain() as log:
            y: Any = linear(x) if as_module else F.linear(x, linear.weight, linear.bias)
        events = [event for event in log.events if event.nbytes]
        assert str(y.sharding) == ("[5@data, 7@seq, 4@model]" if cut else "[5@data, 7@seq, 4]")
        with weft.explain() as log:
            (y * y).sum().backward()
        assert str(x.grad.sharding) == "[5@data, 7@seq, 6]"
        moved = {event.collective for event in log.events if event.nbytes}
        grads = [linear.weight.grad, linear.bias.grad, x.grad]
        full = [one.full_tensor() if isinstance(one, ShardTensor) else one for one in grads]
        return events, y.detach().full_tensor(), moved, full

    linear, x = layer(), X.clone().requires_grad_()
    y = linear(x)
    (y * y).sum().backward()
    for events, found, moved, grads in weft.testing.run(on_rank, mesh=MESH):
        assert events == [] and moved == {"AllReduce"}
        torch.testing.assert_close(found, y.detach())
        torch.testing.assert_close(grads, [linear.weight.grad, linear.bias.grad, x.grad])
