"""`mark_sharding` of a plain Parameter: what module and optimizer hold becomes sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft import ShardTensor, UnsupportedOpError
from weft.spmd import Mesh, mark_sharding

MESH = {"dp": 2, "tp": 2}
X = torch.linspace(-1, 1, 42, dtype=torch.float64).view(7, 6)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor


class Tied(nn.Module):
    """One weight under two names, uneven in both dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again = nn.Linear(6, 9), nn.Linear(6, 9)
        self.again.weight = self.first.weight
        self.last = nn.Linear(9, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.again(x))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda one: torch.optim.SGD(one, lr=0.1, momentum=0.9),
    "AdamW": lambda one: torch.optim.AdamW(one, lr=0.1),
    "AdamW foreach": lambda one: torch.optim.AdamW(one, lr=0.1, foreach=True),
    "Adafactor": lambda one: torch.optim.Adafactor(one, lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mark_at", [0, 2])
def test_an_optimizer_of_before_trains_what_was_marked(optimizer: str, mark_at: int) -> None:
    """State of before goes on, and so does the gradient of the step before (accumulated)."""

    def train(mesh: Any) -> list[Any]:
        model = Tied()
        made = OPTIMIZERS[optimizer](model.parameters())
        losses = []
        for step in range(5):
            if step == mark_at and mesh is not None:
                mark_sharding(model.first.weight, mesh, ("tp", "dp"))
                mark_sharding(model.last.weight, mesh, (None, "tp"))
                mark_sharding(model.last.bias, mesh, ("dp",))
            loss = model(X).square().mean()
            if step != mark_at:
                made.zero_grad()
            loss.backward()
            made.step()
            losses.append(loss.item())
            del loss
        if mesh is not None:
            for name in ("momentum_buffer", "exp_avg"):
                state = made.state[model.first.weight]
                assert name not in state or state[name].sharding == model.first.weight.sharding
        return [losses, *(whole(one).detach() for one in model.parameters())]

    expected = train(None)
    for found in weft.testing.run(train, mesh=MESH):
        torch.testing.assert_close(found, expected)


def test_it_stays_the_object_with_all_that_hangs_on_it() -> None:
    def on_rank(mesh: Any) -> None:
        model = Tied()
        weight: Any = model.first.weight
        weight.tag = ["mine"]
        seen: list[tuple[str, Any]] = []
        one = weight.register_hook(lambda g: seen.append(("hook", g)))
        weight.register_post_accumulate_grad_hook(lambda w: seen.append(("post", w.grad)))
        model(X).sum().backward()
        grad = weight.grad.clone()
        marked = mark_sharding(weight, Mesh(range(4), (2, 2), ("dp", "tp")), (None, "tp"))
        assert marked is weight is model.first.weight is model.again.weight
        assert type(weight) is ShardTensor and isinstance(weight, nn.Parameter)
        assert weight.tag == ["mine"] and str(weight.sharding) == "[9, 6@tp]"
        assert dict(model.named_parameters())["first.weight"] is weight
        assert mark_sharding(weight, mesh, (None, "tp")) is weight
        torch.testing.assert_close(weight.grad.full_tensor(), grad)
        seen.clear()
        model(X).sum().backward()
        torch.testing.assert_close(weight.grad.full_tensor(), 2 * grad)
        assert [name for name, _ in seen] == ["hook", "post"]
        torch.testing.assert_close(seen[0][1].full_tensor(), grad)
        torch.testing.assert_close(seen[1][1].full_tensor(), 2 * grad)
        one.remove()
        model(X).sum().backward()
        assert [name for name, _ in seen] == ["hook", "post", "post"]
        other = copy.deepcopy(model)
        assert other.first.weight is other.again.weight is not weight
        assert other.first.weight.tag == ["mine"] and other.first.weight.sharding == weight.sharding
        with torch.no_grad():
            weight.zero_()
        assert other.first.weight.full_tensor().abs().min() > 0

    weft.testing.run(on_rank, mesh=MESH)


def test_frozen_recurrent_and_outside() -> None:
    def on_rank(mesh: Any) -> None:
        torch.manual_seed(0)
        frozen, lstm = nn.Linear(6, 4), nn.LSTM(6, 4, batch_first=True)
        frozen.weight.register_hook(lambda g: None)
        frozen.requires_grad_(False)
        x = X.float()[None]
        expected = frozen(x), lstm(x)[0].detach()
        mark_sharding(frozen.weight, mesh, ("tp",))
        assert not frozen.weight.requires_grad
        weight: Any = lstm.weight_ih_l0
        mark_sharding(weight, mesh, ("tp",))  # which the module also keeps in a list
        torch.testing.assert_close(whole(frozen(x)), expected[0])
        torch.testing.assert_close(whole(lstm(x)[0]).detach(), expected[1])
        assert type(lstm._flat_weights[0]) is ShardTensor
        part = Mesh([1, 2], (2,), ("x",))
        away = mark_sharding(nn.Linear(6, 4).weight, part, ("x",))
        assert tuple(away.to_local().shape) == ((2, 6) if mesh.rank in (1, 2) else (0,))

    weft.testing.run(on_rank, mesh=MESH)


def test_graphs_of_before_are_refused() -> None:
    def on_rank(mesh: Any) -> list[str]:
        said = []
        model = nn.Linear(6, 4).double()
        loss = model(X).sum()  # leads to the weight, and has not saved it
        mark_sharding(model.weight, mesh, ("tp",))
        with pytest.raises(UnsupportedOpError) as told:
            loss.backward()
        said.append(str(told.value))
        model = nn.Linear(6, 4).double()
        before = model.weight.detach().clone()
        loss = (model.weight ** 2).sum()  # has saved it
        with pytest.raises(UnsupportedOpError) as told:
            mark_sharding(model.weight, mesh, ("tp",))
        said.append(str(told.value))
        assert type(model.weight) is nn.Parameter
        loss.backward()
        torch.testing.assert_close(model.weight.grad, 2 * before)
        mark_sharding(model.weight, mesh, ("tp",))  # the graph has been walked back
        torch.testing.assert_close(whole(model.weight.grad), 2 * before)
        return said

    texts = weft.testing.run(on_rank, mesh=MESH)
    assert all(text == texts[0] for text in texts)
    assert texts[0][0].startswith(
        "backward: a Parameter of shape (4, 6) was plain when this graph was recorded, and "
        "mark_sharding has made it")
    assert texts[0][1].startswith(
        "mark_sharding(t): t is a Parameter of shape (4, 6) that 2 others hold beside its Python")


class Mine(nn.Parameter):
    """A class of a user's own."""


@pytest.mark.parametrize(("make", "spec", "said"), [
    (lambda: Mine(X.clone()), ("dp",), "t is a Parameter of shape (7, 6), and its class is Mine."),
    (lambda: nn.LazyLinear(4).weight, (), "t is a Parameter, and it has no shape yet."),
    (lambda: nn.Parameter(X.to_sparse()), ("dp",), "t is a Parameter of shape (7, 6), and it is "
     "torch.sparse_coo."),
])
def test_other_parameters_are_refused(make: Any, spec: Any, said: str) -> None:
    def on_rank(mesh: Any) -> str:
        parameter = make()
        with pytest.raises(UnsupportedOpError) as told:
            mark_sharding(parameter, mesh, spec)
        assert not isinstance(parameter, ShardTensor)
        return str(told.value)

    texts = weft.testing.run(on_rank, mesh=MESH)
    assert len(set(texts)) == 1 and texts[0].startswith(f"mark_sharding(t): {said}")
