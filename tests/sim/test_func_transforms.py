"""torch.func's transforms of functions of ShardTensors, given or closed over: values are those of
one process, on uneven shards and empty ones; results are in a graph where
torch's are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)
from torch.utils._pytree import tree_leaves

import weft
from tests.harness import ranks
from weft import P, ShardTensor, UnsupportedOpError


def _made(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(x @ w) * x[:, :1]


def _transposed(x: Tensor, w: Tensor) -> Any:
    out, pull = vjp(_made, x, w)[:2]
    return out, pull(out * 2), pull(out)


def _in_layers(x: Tensor, w: Tensor) -> Any:
    def inner(a: Tensor) -> Tensor:
        return grad(lambda b: (torch.sin(b @ w) * a.sum()).sum())(x).square().sum()

    return grad(inner)(x * 2)


pytestmark = pytest.mark.filterwarnings(  # torch's forward AD of plain tensors; ops of derivatives
    "ignore:.*torch.jit.script. is deprecated:DeprecationWarning",
    "ignore:.*no rule covers it:weft.WeftWarning")

CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grad": lambda x, w: grad(lambda a: _made(a, w).sum())(x),
    "grad of a part": lambda x, w: grad(lambda a: _made(x, a)[1:, :2].sum())(w),
    "grad, two arguments": lambda x, w: grad(
        lambda a, b: _made(a, b).square().mean(), (0, 1))(x, w),
    "grad and value": lambda x, w: grad_and_value(
        lambda a: (_made(a, w).sum(), a * 2), has_aux=True)(x),
    "grad in grad": _in_layers,
    "grad in place": lambda x, w: grad(lambda a: (a * 1).mul_(x).add_(a).sum())(x),
    "grad of vmap": lambda x, w: grad(
        lambda a: vmap(lambda row: (row @ a).sin().sum())(x).sum())(w),
    "vmap of grad": lambda x, w: vmap(grad(lambda row: (row @ w[:, :1]).sin().sum()))(x),
    "vmap of hessian": lambda x, w: vmap(hessian(lambda row: (row @ w).sin().sum()))(x),
    "vjp": _transposed,
    "jvp": lambda x, w: jvp(_made, (x, w), (x * 3, w + 1)),
    "jvp with more": lambda x, w: jvp(
        lambda a: (_made(a, w), a * 2), (x,), (x * 3,), has_aux=True),
    "jacrev": lambda x, w: jacrev(lambda a: _made(a, w).sum(0))(x),
    "jacrev in parts": lambda x, w: jacrev(lambda a: _made(a, w).sum(0), chunk_size=2)(x),
    "jacfwd": lambda x, w: jacfwd(lambda a: _made(x, a).sum(0))(w),
    "hessian": lambda x, w: hessian(lambda a: _made(x, a).sum())(w),
    "closed over alone": lambda x, w: grad(
        lambda a: (a * w[:, :2].cumsum(0)).sum() * x.sum())(w[:, 2:]),
}
SPECS = {
    "rows": (P("x"), P()), "columns": (P(None, "x"), P("x", "y")),
    "both": (P("x", "y"), P(None, "x")), "whole": (P(), P()),
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", CALLS)
def test_as_in_one_process(name: str, spec: str) -> None:
    """Two rows on three ranks, four columns on two."""
    torch.manual_seed(0)
    full = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    due = tree_leaves(CALLS[name](*full))

    @ranks(x=3, y=2)
    def run(mesh: Any) -> None:
        found = tree_leaves(CALLS[name](
            *(weft.distribute_tensor(one, mesh, at) for one, at in zip(full, SPECS[spec]))))
        assert len(found) == len(due)
        for one, wanted in zip(found, due):
            assert type(one) is ShardTensor and not one.requires_grad
            torch.testing.assert_close(one.full_tensor(), wanted, rtol=1e-12, atol=1e-12)

    run()


@pytest.mark.parametrize(
    "shardings", [{}, {"*": P("dp")}, {"0.*": P("tp"), "2.weight": P(None, "tp")}])
def test_gradients_of_parameters_and_of_single_samples(shardings: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(7, 3, dtype=torch.float64)

    def results(model: nn.Module, x: Tensor) -> Any:
        def loss(params: Any, x: Tensor) -> Tensor:
            return functional_call(model, params, (x,)).square().mean()

        params = {name: one.detach() for name, one in model.named_parameters()}
        return (grad(loss)(params, x), vmap(grad(loss), (None, 0))(params, x),
                jvp(lambda params: loss(params, x), (params,), (params,)))

    due = tree_leaves(results(model, x))

    @ranks(dp=2, tp=2)
    def run(mesh: Any) -> None:
        mine = copy.deepcopy(model)
        weft.distribute_module(mine, mesh, shardings=shardings)
        found = results(mine, weft.distribute_tensor(x, mesh, P("dp")))
        for one, wanted in zip(tree_leaves(found), due, strict=True):
            torch.testing.assert_close(one.full_tensor(), wanted, rtol=1e-12, atol=1e-12)
        mine(weft.distribute_tensor(x, mesh, P("dp"))).sum().backward()  # as before
        assert all(one.grad is not None for one in mine.parameters())

    run()


def test_what_is_closed_over_has_its_own_gradient() -> None:
    """The result belongs to the graph of what was closed over, and plain arguments serve, too."""
    torch.manual_seed(0)
    x, w = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    def results(x: Tensor, w: Tensor) -> list[Tensor]:
        penalty = grad(lambda a: (x @ a).sin().sum())(w)
        return [penalty, *torch.autograd.grad(penalty.square().sum(), x)]

    due = results(x.clone().requires_grad_(), w)

    @ranks(x=3)
    def run(mesh: Any) -> None:
        for given in (w, weft.distribute_tensor(w, mesh, P())):
            found = results(weft.distribute_tensor(x, mesh, P("x")).requires_grad_(), given)
            for one, wanted in zip(found, due):
                torch.testing.assert_close(one.full_tensor(), wanted, rtol=1e-12, atol=1e-12)

    run()


def test_no_state_is_left_after_an_error() -> None:
    @ranks(x=2)
    def run(mesh: Any) -> None:
        x = weft.distribute_tensor(torch.ones(4, 3), mesh, P("x"))
        with pytest.raises(RuntimeError, match="scalar"):
            grad(lambda a: a * 2)(x)
        with pytest.raises(UnsupportedOpError):
            torch.func.functionalize(lambda a: a * 2)(x)
        assert (x * 2).sum().item() == 24

    run()
