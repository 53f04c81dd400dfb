"""Tensors that are R: replicated, with a partial gradient that is reduced on its way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from tests.harness import ranks
from weft import Layout, P, Partial, PlacementError, Replicate, Shard
from weft.nn.pins import Brought

X = torch.arange(15.0, dtype=torch.double).reshape(5, 3) / 7 - 1
W = torch.arange(21.0, dtype=torch.double).reshape(7, 3) / 5 - 1


def program(x: Any, w: Any) -> Any:
    """Uses beside a sharded operand, of views and casts, and by itself."""
    return (
        F.linear(x, w).tanh().sum() + (x @ w.t()[:, :4]).square().sum() + 0.1 * (w ** 2).sum()
        + F.linear(x, (w * 3).clone()).cos().sum()
    )


def others(x: Any, w: Any) -> Any:
    """Uses that know no R: in place, and in a Function."""
    doubled = w * 2
    doubled += w
    kept = torch.utils.checkpoint.checkpoint(torch.tanh, w, use_reentrant=True)
    return program(x, doubled) + (x @ kept.mT).sum()


def test_uses_that_know_no_r() -> None:
    plain = W.clone().requires_grad_()
    others(X, plain).backward()

    @ranks(x=3)
    def on_rank(mesh: Any) -> None:
        w = weft.distribute_tensor(W, mesh, P("x")).requires_grad_()
        others(weft.distribute_tensor(X, mesh, P("x")), w.redistribute(
            P(), grad_placements=[Partial()])).backward()
        torch.testing.assert_close(w.grad.full_tensor(), plain.grad)

    on_rank()


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_a_gradient_is_reduced_once_where_the_tensor_becomes_varying(spec: P) -> None:
    plain = W.clone().requires_grad_()
    program(X, plain).backward()

    @ranks(x=3)
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P("x"))
        w = weft.distribute_tensor(W, mesh, spec).requires_grad_()
        with weft.explain() as log:
            program(x, w.redistribute(P(), grad_placements=[Partial()])).backward()
        back = [event for event in log.events if event.direction == "backward"]
        told = "backward"  # the terms of the loss, for every rank
        assert [event.op for event in back if event.op != told] == ["redistribute"]
        assert (w.grad.spec, w.grad.dtype) == (spec, torch.double)
        torch.testing.assert_close(w.grad.full_tensor(), plain.grad)

    on_rank()


def test_second_derivatives_and_hooks() -> None:
    plain = W.clone().requires_grad_()
    [first] = torch.autograd.grad(program(X, plain), [plain], create_graph=True)
    [second] = torch.autograd.grad((first ** 3).sum(), [plain])

    @ranks(x=3)
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P("x"))
        w = weft.distribute_tensor(W, mesh, P("x")).requires_grad_()
        seen = []
        full = w.redistribute(P(), grad_placements=[Partial()])
        full.register_hook(lambda grad: seen.append(grad))
        [one] = torch.autograd.grad(program(x, full), [w], create_graph=True)
        torch.testing.assert_close(seen[0].full_tensor(), first)
        [two] = torch.autograd.grad((one ** 3).sum(), [w])
        torch.testing.assert_close(two.full_tensor(), second)

    on_rank()


@ranks(x=2, y=2)
def test_two_axes_and_one_of_two(mesh: Any) -> None:
    plain = W.clone().requires_grad_()
    F.linear(X, plain).square().sum().backward()
    for placements, grads in (
        ([Shard(0), Shard(1)], [Partial(), Partial()]),
        ([Shard(0), Replicate()], [Partial(), Replicate()]),
        ([Shard(0), Replicate()], [Partial(), Partial()]),
    ):
        x = weft.distribute_tensor(X, mesh, P(("x", "y")))
        w = weft.distribute_tensor(W, mesh, placements).requires_grad_()
        full = w.redistribute(P(), grad_placements=grads)
        F.linear(x, full).square().sum().backward()
        torch.testing.assert_close(w.grad.full_tensor(), plain.grad)


@ranks(x=2)
def test_other_gradients_are_refused(mesh: Any) -> None:
    w = weft.distribute_tensor(W, mesh, P("x")).requires_grad_()
    for placements in ([Shard(0)], [Partial("max")]):
        with pytest.raises(PlacementError, match="grad_placements"):
            w.redistribute(P(), grad_placements=placements)


@ranks(a=2, b=2)
def test_axes_that_become_sharded_are_no_longer_r(mesh: Any) -> None:
    meta = weft.distribute_tensor(W[:4, :2], mesh, P("b")).requires_grad_()._meta
    found = Brought((0, 1), 1).move(meta.replace(varying=frozenset({0})))
    assert found is not None
    target, move = found
    assert target == meta.replace(layout=Layout(mesh.abstract, (4, 2), P(None, ("a", "b"))))
    assert move is not None and not move.dst_varying
