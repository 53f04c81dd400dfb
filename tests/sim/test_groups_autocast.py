"""Under autocast parameters are cast before they are gathered, where nothing but products uses
them: half the bytes, and to the bit the values of gathering first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.harness import ranks
from tests.sim import test_groups
from tests.sim.test_groups import CASES, IDS, Model, gradients, loss_of
from weft import P
from weft.nn.groups import group as groups


def make(change: Callable[[Any], Any] = lambda model: None) -> Any:
    torch.manual_seed(0)
    model = Model()
    change(model)
    return model


def loss_under_autocast(model: Any, ids: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, ids)


step = partial(test_groups.step, loss_of=loss_under_autocast)
twice = partial(test_groups.twice, step=step)


def accumulated(model: Any, ids: Any) -> Any:
    if not isinstance(model.place, weft.ShardTensor):
        return [step(model, ids) for _ in range(3)][-1]
    with weft.nn.accumulate(model):
        return [step(model, ids) for _ in range(3)][-1]


def without_autocast_between(model: Any, ids: Any) -> Any:
    step(model, ids)
    with torch.no_grad():
        loss_of(model, ids)
        loss_under_autocast(model, ids)
    loss_of(model, ids).backward()
    return step(model, ids)


def by_grad(model: Any, ids: Any) -> Any:
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss_under_autocast(model, ids), parameters)
    for one, grad in zip(parameters, found):
        assert grad.dtype == one.dtype
        one.grad = grad
    return step(model, ids)


def second_order(model: Any, ids: Any) -> Any:
    parameters = list(model.parameters())
    found = torch.autograd.grad(
        loss_under_autocast(model, ids), parameters, create_graph=True)
    loss = sum([one.square().sum() for one in found])
    loss.backward()  # type: ignore[union-attr]
    return loss


def used_otherwise(model: Any, ids: Any) -> Any:
    """What reads a parameter beside its product: its values, a view, a part without autocast."""
    def runs(block: Any, x: Any) -> Any:
        out = block(x)
        return out + block.up.bias.sum()

    def forward(x: Any) -> Any:
        up = model.layers[1].up
        assert up.weight.dtype == torch.float32
        with torch.autocast("cpu", enabled=False):
            inner = F.linear(x, up.weight) + up.bias
        return F.linear(F.gelu(inner + F.linear(x, up.weight[:, :])), model.layers[1].down.weight)

    model.layers[1].forward = forward
    model.runs = runs
    return twice(model, ids)


PROGRAMS: dict[str, Any] = {
    **{name: (twice, change) for name, (_, change) in CASES.items()},
    **{one.__name__: (one, lambda model: None) for one in (
        accumulated, without_autocast_between, by_grad, second_order, used_otherwise)},
}


@pytest.mark.parametrize("name, axes", [
    *[(name, {"dp": 2}) for name in PROGRAMS], ("used_otherwise", {"tp": 2, "dp": 3})])
def test_values_are_those_of_gathering_first(
    name: str, axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, change = PROGRAMS[name]
    spec = P(tuple(axes))

    def on_rank(mesh: Any) -> Any:
        model = make(change)
        weft.distribute_module(model, mesh, shardings={"*": spec})
        loss = program(model, weft.distribute_tensor(IDS, mesh, P("dp")))
        return loss.full_tensor().detach(), gradients(model)

    loss, found = weft.testing.run(on_rank, mesh=axes)[0]
    monkeypatch.setattr(groups, "autocast_dtype", lambda mesh: None)
    first_loss, first = weft.testing.run(on_rank, mesh=axes)[0]
    assert torch.equal(loss, first_loss)
    assert found.keys() == first.keys()
    for at, grad in first.items():
        # What several backwards find is added before or after its reduction.
        close = 1e-6 if name == "accumulated" else 0.0
        torch.testing.assert_close(found[at], grad, atol=close, rtol=close)
    plain = make(change)
    torch.testing.assert_close(loss, program(plain, IDS).detach(), atol=2e-2, rtol=2e-2)
    for at, grad in gradients(plain).items():
        torch.testing.assert_close(found[at], grad, atol=4e-2, rtol=4e-2)


@ranks(dp=4)
def test_half_the_bytes_travel(mesh: Any) -> None:
    model = make()
    weft.distribute_module(model, mesh, shardings={"*": P("dp")})
    ids = weft.distribute_tensor(IDS, mesh, P("dp"))

    def gathers() -> list[Any]:
        model.zero_grad()
        with weft.explain() as log:
            step(model, ids)
        return [(one.direction, one.nbytes) for one in log.events
                if one.collective == "AllGather" and one.op == "parameters of layers.0"]

    block = model.layers[0]
    block.forward = lambda x: x + block.down(F.gelu(block.up(block.norm(x))))
    first, second, third = gathers(), gathers(), gathers()

    def lacking(*parameters: Tensor) -> int:
        return sum(one.numel() - one._local.numel() for one in parameters)  # type: ignore

    whole = [block.norm.weight, block.norm.bias]
    cast = [*block.up.parameters(), *block.down.parameters()]
    nbytes = 4 * lacking(*whole) + 2 * lacking(*cast)
    assert second == third == [("forward", nbytes), ("backward", nbytes)]
    assert ("forward", 2 * lacking(*whole, *cast)) in first
    step(model, ids)
    assert all(one._local.dtype == torch.float32 for one in model.parameters())
