"""Barriers in the backward: reductions that are under way, at most so many, and the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft import ModuleError
from weft.comm import Communicator
from weft.spmd import apply_backward_optimization_barrier, mark_sharding

X = torch.linspace(-1, 1, 5 * 6, dtype=torch.float64).view(5, 6)


class Net(nn.Module):
    """Four blocks, of which the second and the last share a weight; a residual around each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks: Any = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)).double()
        self.blocks[3].weight = self.blocks[1].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


class Flights:
    """What is under way: a wrapper of `start_all_reduce`."""

    def __init__(self, start: Callable[..., Any]) -> None:
        self.start, self.now, self.most = start, 0, 0
        self.said: list[int] = []

    def __call__(self, comm: Communicator, x: Tensor, kind: str, own: bool) -> Any:
        finish = self.start(comm, x, kind, own)
        if comm.index:  # one rank counts
            return finish
        self.now += 1
        self.most = max(self.most, self.now)
        self.said.append(x.numel())

        def counted() -> Tensor:
            self.now -= 1
            return finish()

        return counted


@pytest.mark.parametrize("num_ranks", [2, 4, 8])  # of 8 ranks some have no rows
@pytest.mark.parametrize("most", [1, 2])
def test_values_are_the_same_and_few_are_under_way(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, most: int
) -> None:
    start = Communicator.start_all_reduce
    flights = Flights(start)
    monkeypatch.setattr(  # which is waited for at once
        Communicator, "all_reduce",
        lambda comm, x, kind, own=False: start(comm, x, kind, own)())
    monkeypatch.setattr(
        Communicator, "start_all_reduce",
        lambda comm, x, kind, own=False: flights(comm, x, kind, own))

    def on_rank(mesh: Any) -> list[Tensor]:
        net = weft.distribute_module(Net(), mesh, gather=False)
        handles = [apply_backward_optimization_barrier(one, most) for one in net.blocks]
        x = mark_sharding(X, mesh, ("dp",)).detach()
        for _ in range(2):  # gradients add up
            net(x).square().sum().backward()
        for handle in handles:
            handle.remove()
        net(x).square().sum().backward()
        return [one.grad.full_tensor() for one in net.parameters()]

    net = Net()
    (3 * net(X).square().sum()).backward()
    for found in weft.testing.run(on_rank, num_ranks, {"dp": num_ranks}):
        torch.testing.assert_close(found, [one.grad for one in net.parameters()])
    # The last block's bias; the third block; the shared weight and the second's bias. The first
    # block's input wants no gradient: it is reduced at the end.
    assert flights.said == [6, 42, 42] * 2
    assert flights.most == most and flights.now == 0


def test_with_marked_weights_and_without_a_backward_through_terms() -> None:
    """Cut weights have nothing to reduce over their axis; gradients as values are as ever."""

    def on_rank(mesh: Any) -> list[Any]:
        net = Net()
        for block in net.blocks:
            apply_backward_optimization_barrier(block)
        mark_sharding(net.blocks[1].weight, mesh, ("tp",))
        mark_sharding(net.blocks[2].weight, mesh, (None, "tp"))
        x = mark_sharding(X, mesh, ("dp",)).detach().requires_grad_()
        grads = torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
        net(x).square().sum().backward()
        again = [x.grad, *(one.grad for one in net.parameters())]
        return [[one.full_tensor() if isinstance(one, weft.ShardTensor) else one for one in each]
                for each in (grads, again)]

    net, x = Net(), X.clone().requires_grad_()
    net(x).square().sum().backward()
    expected = [x.grad, *(one.grad for one in net.parameters())]
    for grads, again in weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2}):
        torch.testing.assert_close(grads, expected)
        torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, None])
def test_none_at_all_is_refused(wrong: Any) -> None:
    with pytest.raises(ModuleError, match="at least one reduction is under way"):
        apply_backward_optimization_barrier(nn.Linear(2, 2), wrong)
