"""Terms that one call had to sum up: later calls take the sum, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from weft import Layout, P, ShardTensor, StrictError
from weft.core import Mesh

X = torch.arange(1.0, 25.0, dtype=torch.float64).view(4, 6) / 8
W = torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6)
TP = {"tp": 2}
N = X.numel() * 8


def terms(mesh: Any, leaf: bool = False) -> tuple[Any, Any]:
    """X @ W as terms over tp, and X; or a leaf that is terms of X @ W."""
    x = weft.distribute_tensor(X, mesh, P(None, "tp")).requires_grad_()
    w = weft.distribute_tensor(W, mesh, P("tp"))
    y = x @ w
    assert y.sharding.is_partial
    return (y.detach().requires_grad_(), None) if leaf else (y, x)


def check(program: Any, *, mesh: Any = TP) -> list[Any]:
    return weft.testing.run(program, mesh=mesh)


def test_terms_are_summed_once() -> None:
    """A norm needs the value; what follows goes on from it, so one all-reduce each way serves."""
    def program(mesh: Any) -> Any:
        y, x = terms(mesh)
        with weft.explain() as log:
            scaled = y * (y.pow(2).mean(-1, keepdim=True) + 1).rsqrt()
            out = (scaled + y).relu()
        moved = [(event.op, event.transition, event.nbytes) for event in log.events]
        out.sum().backward()
        return moved, y.sharding.is_partial, out.sharding.is_replicated, x.grad.full_tensor()

    x = X.clone().requires_grad_()
    y = x @ W
    (y * (y.pow(2).mean(-1, keepdim=True) + 1).rsqrt() + y).relu().sum().backward()
    for moved, partial, replicated, grad in check(program):
        assert moved == [("aten.pow.Tensor_Scalar", "P(sum)->I on tp", N)]
        assert partial and replicated
        torch.testing.assert_close(grad, x.grad)


def test_what_is_added_to_a_value_is_summed() -> None:
    """The residual stream: each branch is reduced once, by n bytes over two ranks."""
    def program(mesh: Any) -> Any:
        y, _ = terms(mesh)
        w = weft.distribute_tensor(W, mesh, P(None, "tp"))
        v = weft.distribute_tensor(W, mesh, P("tp"))
        with weft.explain() as log:
            for _ in range(3):
                y = y + torch.layer_norm(y, (6,)) @ w @ v
            y = y.relu()
        return log.nbytes

    assert check(program) == [4 * N] * 2


def test_a_write_is_seen() -> None:
    def program(mesh: Any) -> Any:
        y, _ = terms(mesh)
        with torch.no_grad():
            first = y.relu()
            y.mul_(2)
            second = y.relu() + y.abs()
            y.data.mul_(3)
            third = y.relu()
            y[0].zero_()
            fourth = y.relu()
        return [each.full_tensor() for each in (first, second, third, fourth)]

    y = X @ W
    expected = [y.relu(), 2 * y.relu() + (2 * y).abs(), 6 * y.relu(), 6 * y.relu()]
    expected[3] = expected[3].clone().index_fill_(0, torch.tensor([0]), 0)
    for got in check(program):
        torch.testing.assert_close(got, expected)


def test_it_stays_the_tensor_that_it_is() -> None:
    """Its layout, its local tensor, identities and views."""
    def program(mesh: Any) -> Any:
        y, _ = terms(mesh)
        before, local = y.sharding, y.to_local()
        y.relu()
        assert y.sharding == before and torch.equal(y.to_local(), local)
        assert y.double() is y
        view = y.detach().view(24)
        assert view.sharding.is_partial
        view.zero_()
        return y.relu().full_tensor(), y.detach().relu().full_tensor()

    for got in check(program):
        torch.testing.assert_close(got, (torch.zeros_like(X), torch.zeros_like(X)))


def test_what_was_summed_without_a_graph_serves_none_with_one() -> None:
    def program(mesh: Any) -> Any:
        y, x = terms(mesh)
        with torch.no_grad():
            y.relu()
        y.relu().sum().backward()
        return x.grad.full_tensor()

    x = X.clone().requires_grad_()
    (x @ W).relu().sum().backward()
    for grad in check(program):
        torch.testing.assert_close(grad, x.grad)


@pytest.mark.parametrize("leaf", [False, True])
def test_backward_twice(leaf: bool) -> None:
    """With a graph that is kept, and (of a leaf) with a new one."""
    def program(mesh: Any) -> Any:
        y, x = terms(mesh, leaf)
        loss = (y.exp() * y).sum()
        loss.backward(retain_graph=True)
        if leaf:
            loss = (y.exp() * y).sum()
        loss.backward()
        return (y if leaf else x).grad.full_tensor()

    y = (X @ W).requires_grad_()
    (2 * (y.exp() * y).sum()).backward()
    expected = y.grad if leaf else y.grad @ W.mT
    for grad in check(program):
        torch.testing.assert_close(grad, expected)


def test_hooks_see_the_gradient_of_all_uses() -> None:
    def program(mesh: Any) -> Any:
        y, _ = terms(mesh)
        seen: list[torch.Tensor] = []
        y.register_hook(lambda grad: seen.append(grad.full_tensor()))
        y.retain_grad()
        (y.exp() + y.relu() + 3 * y).sum().backward()
        return seen, y.grad.full_tensor()

    y = (X @ W).requires_grad_()
    (y.exp() + y.relu() + 3 * y).sum().backward()
    for seen, grad in check(program):
        torch.testing.assert_close((seen, grad), ([y.grad], y.grad))


def test_reduced_to_shards() -> None:
    """What meets shards comes to shards, and stays there: nothing more is sent for it."""
    def program(mesh: Any) -> Any:
        y, _ = terms(mesh)
        z = weft.distribute_tensor(X, mesh, P("tp"))
        with torch.no_grad():
            first = y.relu() * z
            with weft.explain() as log:
                second = y * z
        return log.nbytes, first.full_tensor(), second.full_tensor()

    y = X @ W
    for nbytes, first, second in check(program):
        assert nbytes == 0
        torch.testing.assert_close((first, second), (y.relu() * X, y * X))


def test_strict_names_the_call() -> None:
    def program(mesh: Any) -> Any:
        y, _ = terms(mesh)
        with weft.strict(), pytest.raises(StrictError, match=r"aten\.relu"):
            y.relu()
        y.relu()
        with weft.strict():
            (y + 1).relu()

    check(program)


def test_a_rank_outside_the_mesh_knows_the_layouts() -> None:
    def program(_: Any) -> Any:
        mesh = weft.init_mesh(Mesh(TP, (2, 0)))
        layout = Layout(mesh.abstract, (4, 6), P(None, None, partial={"tp": "sum"}))
        local = X.clone() if mesh.here is not None else X.new_empty(0)
        y = ShardTensor.from_local(local, mesh, layout)
        made = [y * 2, y.relu(), y * 2, y + y.relu(), torch.nn.functional.silu(y), y.view(24)]
        return [str(each.sharding) for each in made]

    outcomes = weft.testing.run(program, 3, {"all": 3})
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert "partial" in outcomes[0][0] and "partial" not in outcomes[0][2]
