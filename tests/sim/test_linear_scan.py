"""weft.linear_scan equals a loop over time steps, to the second derivative, and sends as much
whatever the length. Layouts are tried by tests/cases/scan.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.harness import ranks
from weft import LayoutError, P


def loop(a: Tensor, b: Tensor, initial: Tensor, reverse: bool) -> Tensor:
    """Along dim 1."""
    state, states = initial, []
    steps = range(b.shape[1])
    for step in reversed(steps) if reverse else steps:
        state = a[:, step] * state + b[:, step]
        states.append(state)
    return torch.stack(states[::-1] if reverse else states, 1)


def operands(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(length)
    a, b, initial = (torch.randn(2, length, 3, dtype=dtype), torch.randn(2, length, 3, dtype=dtype),
                     torch.randn(2, 3, dtype=dtype))
    a[:, length // 2] = 0  # nothing is divided by a product
    return [a, b, initial]


def derivatives(function: Any, given: list[Tensor], laid: Any = lambda one: one) -> list[Tensor]:
    """The result, its gradients, and the gradients of a sum of their squares."""
    out = function(*given)
    torch.manual_seed(1)
    first = torch.autograd.grad(
        out, given, laid(torch.randn(out.shape, dtype=out.dtype)), create_graph=True)
    total: Any = sum([(one.abs() ** 2).sum() for one in first])
    return [out, *first, *torch.autograd.grad(total, given)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [2, 7, 16, 18])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_loop(length: int, reverse: bool, dtype: torch.dtype) -> None:
    given = [one.requires_grad_() for one in operands(length, dtype)]
    got = derivatives(lambda a, b, h: weft.linear_scan(a, b, 1, h, reverse=reverse), given)
    due = derivatives(lambda a, b, h: loop(a, b, h, reverse), given)
    for one, other in zip(got, due):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("reverse", [False, True])
def test_second_derivatives_of_shards(reverse: bool) -> None:
    """Of ragged shards, one of them empty, along the middle of a mesh of two axes."""
    def function(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        return weft.linear_scan(a, b, 1, h, reverse=reverse)

    full = operands(9)
    due = derivatives(function, [one.clone().requires_grad_() for one in full])

    @ranks(dp=2, x=4)
    def run(mesh: Any) -> None:
        def laid(one: Tensor) -> Any:
            cuts = {1: (2, 0, 6, 1)} if one.dim() == 3 else {}
            spec = P("dp", "x") if one.dim() == 3 else P("dp")
            return weft.distribute_tensor(
                one.detach(), mesh, weft.Layout(mesh, one.shape, spec, sizes=cuts))

        given = [laid(one).requires_grad_() for one in full]
        for one, other in zip(derivatives(function, given, laid), due):
            torch.testing.assert_close(one.full_tensor(), other, rtol=1e-11, atol=1e-11)

    run()


@pytest.mark.parametrize("length", [16, 64])
def test_one_exchange_each_way(length: int) -> None:
    @ranks(x=4)
    def run(mesh: Any) -> None:
        a, b, _ = [weft.distribute_tensor(one, mesh, P(None, "x")).requires_grad_()
                   if one.dim() == 3 else one for one in operands(length)]
        with weft.explain() as log:
            out = weft.linear_scan(a, b, 1)
            out.backward(torch.ones_like(out))
        assert out.sharding == a.sharding
        product_and_state = 2 * (2 * 3 * 8)
        assert [event.nbytes for event in log.events] == [3 * product_and_state] * 2

    run()


def test_half_precision_is_rounded_once() -> None:
    a, b, h = operands(50, torch.bfloat16)
    a = a.sigmoid()
    due = loop(a.float(), b.float(), h.float(), False).bfloat16()
    torch.testing.assert_close(weft.linear_scan(a, b, 1, h), due, rtol=2**-8, atol=1e-5)

    @ranks(x=2)
    def run(mesh: Any) -> None:
        laid = [weft.distribute_tensor(one, mesh, P(None, "x")) for one in (a, b)]
        out = weft.linear_scan(laid[0], laid[1], 1, h)
        assert out.dtype is torch.bfloat16
        torch.testing.assert_close(out.full_tensor(), due, rtol=2**-8, atol=1e-5)

    run()


@pytest.mark.parametrize(("shapes", "dim", "said"), [
    (((2, 3), (2, 4)), 1, "a has shape (2, 3), b (2, 4)"),
    (((2, 3), (2, 3)), 2, "dim=2, and a and b have 2 dims"),
    (((2, 3), (2, 3), (3,)), 1, "initial has shape (3,), a step of a and b (2,)"),
])
def test_what_does_not_fit(shapes: Any, dim: int, said: str) -> None:
    @ranks(x=2)
    def run(mesh: Any) -> None:
        a, b, *initial = [weft.distribute_tensor(torch.ones(shape), mesh, P()) for shape in shapes]
        with weft.explain() as log, pytest.raises(LayoutError) as raised:
            weft.linear_scan(a, b, dim, *initial)
        assert said in str(raised.value)
        assert not log.events

    run()
