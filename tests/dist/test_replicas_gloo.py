"""DistributedDataParallel over another axis than the mesh of the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import weft
from tests.gloo import GlooWorld
from weft import ModuleError, P

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3), nn.BatchNorm1d(3)).double()


def trained(net: nn.Module, mine: slice, wrapper: Any = None) -> list[Tensor]:
    """Two steps, the second of two backwards; running statistics are of the first half."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = net if wrapper is None else wrapper
    for step in range(2):
        optimizer.zero_grad()
        if step and wrapper is not None:
            with wrapper.no_sync():
                run(X[mine]).square().mean().backward()
        elif step:
            run(X[mine]).square().mean().backward()
        run(X[mine]).square().mean().backward()
        optimizer.step()
    return [one.full_tensor() if hasattr(one, "full_tensor") else one  # type: ignore
            for one in net.parameters()]


def over_dp(mesh: Any) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(mesh.rank)  # the first rank's values count
    table = {"0.*": P("tp"), "3.weight": P(None, "tp")}
    net = weft.distribute_module(model(), mesh["tp"], shardings=table)
    with torch.no_grad():
        net[0].bias.add_(float(mesh.get_local_rank("dp")))  # type: ignore
    wrapper = DistributedDataParallel(
        net, process_group=mesh.get_group("dp"), broadcast_buffers=False)
    at = mesh.get_local_rank("dp")
    told = []
    for group in (None, mesh.get_group("tp")):
        with pytest.raises(ModuleError) as caught:
            DistributedDataParallel(net, process_group=group)
        told.append(str(caught.value))
    return trained(net, slice(4 * at, 4 * at + 4), wrapper), told


def test_gradients_are_averaged_over_the_other_axis(gloo: GlooWorld) -> None:
    """As those of two plain replicas, each with its half."""
    nets = [model(), model()]
    optimizer = torch.optim.SGD([one for net in nets for one in net.parameters()], lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for at, net in enumerate(nets):
            for _ in range(step + 1):
                net(X[4 * at : 4 * at + 4]).square().mean().backward()
        for pair in zip(*(net.parameters() for net in nets)):
            mean = (pair[0].grad + pair[1].grad) / 2  # type: ignore[operator]
            for one in pair:
                one.grad = mean.clone()
        optimizer.step()
    for found, told in gloo.run(over_dp, {"dp": 2, "tp": 2}):
        for one, due in zip(found, nets[0].parameters(), strict=True):
            torch.testing.assert_close(one, due, rtol=1e-10, atol=1e-12)
        for text in told:
            assert 'weft.init_mesh({\'dp\': 2, \'tp\': 2}), shardings={"0.weight": ' in text
            assert "\"0.bias\": P(('tp', 'dp')), \"1.weight\": P('dp')" in text


def with_an_unused_layer(mesh: Any) -> list[Any]:
    """Each half of the ranks uses a layer of its own, and none the last one."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(6, 5) for _ in range(3)).double()
    weft.distribute_module(layers, mesh["tp"], shardings={"*": P("tp")})
    at = mesh.get_local_rank("dp")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Any:
            return self.layers[at](x)

    wrapper = DistributedDataParallel(Net(), process_group=mesh.get_group("dp"))
    wrapper(X).square().mean().backward()
    return [None if one.grad is None else one.grad.full_tensor()  # type: ignore[attr-defined]
            for one in layers.parameters()]


def test_a_layer_that_one_replica_does_not_use(gloo: GlooWorld) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(6, 5) for _ in range(3)).double()
    for layer in layers[:2]:
        (layer(X).square().mean() / 2).backward()
    for found in gloo.run(with_an_unused_layer, {"dp": 2, "tp": 2}):
        for one, due in zip(found, layers.parameters(), strict=True):
            assert (one is None) == (due.grad is None)
            if one is not None:
                torch.testing.assert_close(one, due.grad, rtol=1e-10, atol=1e-12)
