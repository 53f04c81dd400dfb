"""`mark_sharding` of a plain Parameter: what module and optimizer hold becomes sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.harness import ranks
from weft import ShardTensor, UnsupportedOpError
from weft.spmd import Mesh, clear_sharding, global_tensor, mark_sharding

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


@ranks(**MESH)
def test_it_stays_the_object_with_all_that_hangs_on_it(mesh: Any) -> None:
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
    weight.data = weight.redistribute(placements=weft.P("dp"))
    seen.clear()
    model(X).sum().backward()  # hooks see where it lies now
    torch.testing.assert_close(seen[0][1].full_tensor(), grad)
    assert seen[1][1] is not None and seen[1][1].spec == weight.spec
    one.remove()
    model(X).sum().backward()
    assert [name for name, _ in seen] == ["hook", "post", "post"]
    other = copy.deepcopy(model)
    assert other.first.weight is other.again.weight is not weight
    assert other.first.weight.tag == ["mine"] and other.first.weight.sharding == weight.sharding
    with torch.no_grad():
        weight.zero_()
    assert other.first.weight.full_tensor().abs().min() > 0


@ranks(**MESH)
def test_frozen_recurrent_and_outside(mesh: Any) -> None:
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clears", [True, False])
def test_parameters_are_marked_anew_while_they_train(optimizer: str, clears: bool) -> None:
    """Marked, cleared, marked on another mesh: one training, with gradients that accumulate."""

    def train(mesh: Any) -> list[Any]:
        model = Tied()
        made = OPTIMIZERS[optimizer](model.parameters())
        losses = []
        for step in range(6):
            if mesh is not None:
                remark(mesh, model, step, clears)
            loss = model(X).square().mean()
            if step % 2:
                made.zero_grad()
            loss.backward()
            made.step()
            losses.append(loss.item())
            del loss
        if mesh is not None:
            for value in made.state[model.first.weight].values():
                shaped = value.shape == model.first.weight.shape
                assert not shaped or str(value.spec) == str(model.first.weight.spec)
        return [losses, *(whole(one).detach() for one in model.parameters())]

    expected = train(None)
    for found in weft.testing.run(train, mesh=MESH):
        torch.testing.assert_close(found, expected)


def remark(mesh: Any, model: Tied, step: int, clears: bool) -> None:
    weights: list[Any] = [model.first.weight, model.last.weight, model.last.bias]
    if clears and step in (2, 3, 4):
        for one in weights:
            was = whole(one).detach().clone()
            assert clear_sharding(one) is one and type(one) is nn.Parameter
            assert one.is_leaf and one.requires_grad and torch.equal(one, was)
            assert one.grad is None or type(one.grad) is Tensor
            assert clear_sharding(one) is one
    if step != 3:
        row = Mesh(range(4), (4,), ("row",))
        marks = [((mesh, ("tp", "dp")), (mesh, (None, "tp")), (mesh, ("dp",))),
                 ((row, (None, "row")), (row, ("row",)), (row, ()))][step >= 4]
        for one, (where, spec) in zip(weights, marks):
            assert mark_sharding(one, where, spec) is one
            assert one.spec == weft.P(*spec) and one.device_mesh == where
            assert one.grad is None or one.grad.spec == one.spec


@ranks(**MESH)
def test_what_hangs_on_a_parameter_stays_when_it_is_cleared(mesh: Any) -> None:
    model = Tied()
    weight: Any = model.first.weight
    weight.tag = ["mine"]
    seen: list[tuple[str, Any]] = []
    one = weight.register_hook(lambda g: seen.append(("hook", g)))
    model(X).sum().backward()
    grad = weight.grad.clone()
    mark_sharding(weight, mesh, (None, "tp"))
    post = weight.register_post_accumulate_grad_hook(lambda w: seen.append(("post", w)))
    clear_sharding(weight)
    assert type(weight) is nn.Parameter and weight.tag == ["mine"]
    assert model.first.weight is weight and model.again.weight is weight
    assert not hasattr(weight, "_local")
    torch.testing.assert_close(weight.grad, grad)
    for marks in (False, True, False):
        seen.clear()
        if marks:
            mark_sharding(weight, mesh, ("dp",))
        else:
            clear_sharding(weight)
        weight.grad = None
        model(X).sum().backward()
        assert [name for name, _ in seen] == ["hook", "post"]
        assert type(seen[0][1]) is (ShardTensor if marks else Tensor)
        torch.testing.assert_close(whole(seen[0][1]), grad)
        assert seen[1][1] is weight
    one.remove()
    post.remove()
    seen.clear()
    model(X).sum().backward()
    assert not seen
    frozen: Any = nn.Parameter(X.clone(), requires_grad=False)
    mark_sharding(frozen, mesh, ("tp",))
    assert type(clear_sharding(frozen)) is nn.Parameter and not frozen.requires_grad
    own = nn.Parameter(weft.distribute_tensor(X, mesh, weft.P("dp")))
    held = own.to_local().detach()
    assert type(global_tensor(own)) is Tensor and type(own) is ShardTensor
    clear_sharding(own)
    assert type(own) is nn.Parameter and own.untyped_storage().nbytes() == X.nbytes
    with torch.no_grad():
        own.zero_()
    assert held.abs().min() >= 0 and held.abs().max() > 0


def test_graphs_of_before_a_clear_are_refused() -> None:
    def on_rank(mesh: Any) -> list[str]:
        said = []
        for spec in ((), ("tp",)):
            weight = nn.Parameter(X.clone())
            mark_sharding(weight, mesh, spec)
            x = weft.distribute_tensor(X, mesh, weft.P("dp"))
            loss = (weight * x).sum()
            clear_sharding(weight)
            with pytest.raises(UnsupportedOpError) as told:
                loss.backward()
            said.append(str(told.value))
            assert weight.grad is None
            (weight * 2).sum().backward()
            torch.testing.assert_close(weight.grad, torch.full_like(X, 2))
        return said

    texts = weft.testing.run(on_rank, mesh=MESH)
    assert all(text == texts[0] for text in texts)
    assert texts[0][0].startswith(
        "backward: a Parameter of shape (7, 6) was [7, 6] when this graph was recorded, and "
        "clear_sharding has made it plain since")
    assert "was [7@tp, 6] when" in texts[0][1]


@pytest.mark.parametrize("row", [False, True])
def test_graphs_of_before_another_mark_are_refused(row: bool) -> None:
    def on_rank(mesh: Any) -> str:
        weight = nn.Parameter(X.clone())
        mark_sharding(weight, mesh, ("tp",))
        loss = (weight * weight).sum()
        with torch.no_grad():
            weight.data = weight.redistribute(placements=weft.P("dp"))
        again = (weight * weight).sum()
        mark_sharding(weight, Mesh(range(4), (4,)) if row else mesh, (None, 0))
        with pytest.raises(UnsupportedOpError):
            loss.backward()
        with pytest.raises(UnsupportedOpError) as told:
            again.backward()
        assert weight.grad is None
        (weight * weight).sum().backward()
        torch.testing.assert_close(whole(weight.grad), 2 * X)
        return str(told.value)

    texts = weft.testing.run(on_rank, mesh=MESH)
    assert len(set(texts)) == 1 and "was [7@dp, 6] when this graph was recorded" in texts[0]
