"""Gradient terms of leaves: reduced once, together, at the end of a backward, and never lost."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import weft
from weft import P

X = torch.arange(15.0).reshape(5, 3) / 7 - 1
W = torch.arange(12.0).reshape(3, 4) / 5 - 1
B = torch.arange(4.0) / 3


def leaves(mesh: Any) -> tuple[Any, Any, Any]:
    x = weft.distribute_tensor(X, mesh, P("x"))
    w, b = (weft.distribute_tensor(t, mesh, P()).requires_grad_() for t in (W, B))
    return x, w, b


def expected(program: Any) -> tuple[Any, ...]:
    w, b = W.clone().requires_grad_(), B.clone().requires_grad_()
    program(X, w, b).backward()
    return w.grad, b.grad


def on_ranks(program: Any) -> list[Any]:
    return weft.testing.run(program, mesh={"x": 3})


def linear(x: Any, w: Any, b: Any) -> Any:
    return ((x @ w + b).tanh() + x @ w).square().mean()


def test_all_terms_and_the_loss_are_one_collective() -> None:
    def on_rank(mesh: Any) -> Any:
        x, w, b = leaves(mesh)
        loss = linear(x, w, b)
        seen: list[int] = []
        comm = mesh.comm((0,))
        original = type(comm)._all_reduce

        def counted(self: Any, t: Any, kind: str, own: bool) -> Any:
            seen.append(t.numel())
            return original(self, t, kind, own)

        type(comm)._all_reduce = counted
        try:
            loss.backward()
        finally:
            type(comm)._all_reduce = original
        wanted = expected(linear)
        torch.testing.assert_close(w.grad.to_local(), wanted[0])
        torch.testing.assert_close(b.grad.to_local(), wanted[1])
        return loss.item(), seen

    value = linear(X, W, B).item()
    for found, seen in on_ranks(on_rank):
        assert found == pytest.approx(value) and W.numel() + B.numel() + 1 in seen


def test_gradients_accumulate_over_backwards_and_memory_that_moves() -> None:
    def on_rank(mesh: Any) -> None:
        x, w, b = leaves(mesh)
        linear(x, w, b).backward()
        linear(x, w, b).backward()
        wanted = expected(linear)
        torch.testing.assert_close(w.grad.to_local(), 2 * wanted[0])
        w.grad = b.grad = None
        w.data = weft.distribute_tensor(2 * W, mesh, P())  # other memory, the same leaf
        linear(x, w, b).backward()
        other = (2 * W).requires_grad_()
        linear(X, other, B).backward()
        torch.testing.assert_close(w.grad.to_local(), other.grad)
        with torch.no_grad():
            w.sub_(w.grad)  # in place: the terms see it
        w.grad = None
        linear(x, w, b).backward()
        assert other.grad is not None
        moved = (2 * W - other.grad).requires_grad_()
        linear(X, moved, B).backward()
        torch.testing.assert_close(w.grad.to_local(), moved.grad)

    on_ranks(on_rank)


def mixed(x: Any, w: Any, b: Any) -> Any:
    """w is used both by what varies and by what does not."""
    return (x @ w).square().mean() + (w * 3).square().sum()


def test_uses_that_vary_and_that_do_not_add_up() -> None:
    def on_rank(mesh: Any) -> None:
        x, w, b = leaves(mesh)
        mixed(x, w, b).backward()
        torch.testing.assert_close(w.grad.to_local(), expected(mixed)[0])

    on_ranks(on_rank)


def test_grad_asks_for_the_leaf_and_gets_all_its_terms() -> None:
    def on_rank(mesh: Any) -> None:
        x, w, b = leaves(mesh)
        (found,) = torch.autograd.grad(mixed(x, w, b), [w], create_graph=True)
        plain = W.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(mixed(X, plain, B), [plain], create_graph=True)
        torch.testing.assert_close(found.to_local(), wanted)
        found.square().sum().backward()
        wanted.square().sum().backward()
        torch.testing.assert_close(w.grad.to_local(), plain.grad)
        assert b.grad is None
        unused = torch.autograd.grad(linear(x, w, b), [w, x.clone().requires_grad_()],
                                     allow_unused=True)
        assert unused[0] is not None and unused[1] is None
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(mixed(x, w, b), [w, b])

    on_ranks(on_rank)


def test_backward_of_some_inputs_and_of_a_plain_loss() -> None:
    def on_rank(mesh: Any) -> None:
        x, w, b = leaves(mesh)
        linear(x, w, b).backward(inputs=[b])
        wanted = expected(linear)
        assert w.grad is None
        torch.testing.assert_close(b.grad.to_local(), wanted[1])
        b.grad = None
        linear(x, w, b).full_tensor().backward()
        torch.testing.assert_close(b.grad.to_local(), wanted[1])
        torch.testing.assert_close(w.grad.to_local(), wanted[0])
        (alone,) = torch.autograd.grad(linear(x, w, b).full_tensor(), [w])
        torch.testing.assert_close(alone.to_local(), wanted[0])

    on_ranks(on_rank)


def test_double_backward_accumulates_in_the_leaf() -> None:
    def program(x: Any, w: Any, b: Any) -> Any:
        linear(x, w, b).backward(create_graph=True)
        penalty = w.grad.square().sum() + b.grad.square().sum()
        w.grad = b.grad = None
        return penalty

    def on_rank(mesh: Any) -> None:
        x, w, b = leaves(mesh)
        program(x, w, b).backward()
        for found, wanted in zip((w, b), expected(program)):
            torch.testing.assert_close(found.grad.to_local(), wanted)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
        on_ranks(on_rank)


@pytest.mark.parametrize("when", ["before", "between"])
def test_hooks_see_the_sum_once(when: str) -> None:
    def on_rank(mesh: Any) -> None:
        x, w, b = leaves(mesh)
        seen: list[Any] = []
        done: list[Any] = []
        if when == "between":
            loss = linear(x, w, b)
        w.register_hook(lambda g: seen.append(g.to_local().clone()) or g * 2)
        b.register_post_accumulate_grad_hook(lambda t: done.append(t.grad.to_local().clone()))
        if when == "before":
            loss = linear(x, w, b)
        loss.backward()
        wanted = expected(linear)
        assert len(seen) == len(done) == 1
        torch.testing.assert_close(seen[0], wanted[0])
        torch.testing.assert_close(w.grad.to_local(), 2 * wanted[0])
        torch.testing.assert_close(done[0], wanted[1])

    on_ranks(on_rank)


def test_hooks_before_the_forward_on_mixed_uses_see_the_sum() -> None:
    def on_rank(mesh: Any) -> None:
        x, w, b = leaves(mesh)
        mixed(x, w, b).backward()  # terms exist
        w.grad = None
        w.register_hook(lambda g: g.clamp(0, 1))
        mixed(x, w, b).backward()
        torch.testing.assert_close(w.grad.to_local(), expected(mixed)[0].clamp(0, 1))

    on_ranks(on_rank)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise ArithmeticError


def test_a_failed_backward_leaves_no_terms_behind() -> None:
    def on_rank(mesh: Any) -> None:
        x, w, b = leaves(mesh)
        v = weft.distribute_tensor(torch.zeros(5, 4), mesh, P("x")).requires_grad_()
        failing = _Fails.apply(v.full_tensor())
        with pytest.raises(ArithmeticError):
            (failing.sum() * 0 + linear(x, w, b).full_tensor()).backward()
        w.grad = b.grad = None
        linear(x, w, b).backward()
        torch.testing.assert_close(w.grad.to_local(), expected(linear)[0])

    on_ranks(on_rank)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_keep_terms(reentrant: bool) -> None:
    def on_rank(mesh: Any) -> None:
        x, w, b = leaves(mesh)
        start = x.clone().requires_grad_()

        def part(x: Any) -> Any:
            return F.gelu(x @ w + b)

        checkpoint(part, start, use_reentrant=reentrant).square().mean().backward()
        plain_w, plain_b = W.clone().requires_grad_(), B.clone().requires_grad_()
        F.gelu(X @ plain_w + plain_b).square().mean().backward()
        torch.testing.assert_close(w.grad.to_local(), plain_w.grad)
        torch.testing.assert_close(b.grad.to_local(), plain_b.grad)

    on_ranks(on_rank)


def test_a_backward_within_a_backward_is_complete_when_it_returns() -> None:
    def on_rank(mesh: Any) -> None:
        x, w, b = leaves(mesh)
        inner_x, inner_w, inner_b = leaves(mesh)
        seen: list[Any] = []

        def hook(grad: Any) -> None:
            with torch.enable_grad():
                linear(inner_x, inner_w, inner_b).backward()
            seen.append(inner_w.grad.to_local().clone())

        y = x @ w + b
        y.register_hook(hook)
        y.square().mean().backward()
        torch.testing.assert_close(seen[0], expected(linear)[0])

    on_ranks(on_rank)


def test_a_users_own_leaf_keeps_its_graph() -> None:
    def on_rank(mesh: Any) -> None:
        x, _, b = leaves(mesh)
        mine = W.clone().requires_grad_()
        w = weft.ShardTensor.from_local(mine, mesh, P())
        (found,) = torch.autograd.grad(linear(x, w, b).full_tensor(), [mine])
        torch.testing.assert_close(found, expected(linear)[0])

    on_ranks(on_rank)


def two_ways(x: Any, y: Any, w: Any) -> Any:
    """w is a term over one axis, and another over the other."""
    return (x @ w).tanh().sum() + (y @ w).exp().sum()


@pytest.mark.parametrize("when", ["before", "between"])
def test_hooks_see_the_sum_of_several_terms(when: str) -> None:
    def program(x: Any, y: Any, w: Any) -> Any:
        seen: list[Any] = []

        def hook(grad: Any) -> Any:
            seen.append(grad.clone())
            return grad.clamp(-1, 1)

        if when == "before":
            w.register_hook(hook)
        loss = two_ways(x, y, w)
        if when == "between":
            w.register_hook(hook)
        loss.backward()
        return [*seen, w.grad]

    def on_rank(mesh: Any) -> list[Any]:
        w = weft.distribute_tensor(W, mesh, P()).requires_grad_()
        x, y = (weft.distribute_tensor(X, mesh, P(axis)) for axis in ("dp", "tp"))
        return [one.to_local().clone() for one in program(x, y, w)]

    wanted = program(X, X, W.clone().requires_grad_())
    for found in weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2}):
        assert len(found) == len(wanted) == 2
        for one, due in zip(found, wanted):
            torch.testing.assert_close(one, due)


def test_leaves_and_their_terms_are_freed() -> None:
    """Not even the collector is needed: no cycle leads through a hook."""
    def on_rank(mesh: Any) -> list[bool]:
        x, *_ = leaves(mesh)
        alive = []
        for backward in (False, True):
            w = weft.distribute_tensor(W, mesh, P(), src_data_rank=None).requires_grad_()
            found = weakref.ref(w._local)
            loss = (x @ w).square().sum()
            if backward:
                loss.backward()
            del w, loss
            alive.append(found() is not None)
        return alive

    gc.disable()
    try:
        assert on_ranks(on_rank) == [[False, False]] * 3
    finally:
        gc.enable()


def test_nothing_is_written_on_the_users_local_tensor() -> None:
    def on_rank(mesh: Any) -> None:
        x, w, b = leaves(mesh)
        loss = linear(x, w, b)
        with torch.no_grad():
            local = w.to_local()
        file = io.BytesIO()
        torch.save(local, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True), W)
        twin = copy.deepcopy(local)
        assert not local.__dict__ and not twin.__dict__
        other = weft.ShardTensor.from_local(twin.detach(), mesh, P()).requires_grad_()
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(loss, [other])

    on_ranks(on_rank)


def test_a_leaf_that_stops_wanting_gradients_gets_none() -> None:
    def on_rank(mesh: Any) -> None:
        x, w, b = leaves(mesh)
        loss = linear(x, w, b)
        w.requires_grad_(False)
        loss.backward()
        assert w.grad is None
        torch.testing.assert_close(b.grad.to_local(), expected(linear)[1])

    on_ranks(on_rank)


def test_gradients_have_no_memory_or_version_in_common() -> None:
    """They are reduced in one buffer."""
    def on_rank(mesh: Any) -> None:
        x, w, b = leaves(mesh)
        linear(x, w, b).backward()
        other = weft.ones(3, 4, mesh=mesh, spec=P(), requires_grad=True)
        loss = (w.grad * other).sum()
        b.grad.mul_(2)
        loss.backward()
        torch.testing.assert_close(other.grad.to_local(), expected(linear)[0])
        w.grad.detach_()

    on_ranks(on_rank)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_gradient_that_somebody_holds_is_not_written_to() -> None:
    def program(x: Any, w: Any, b: Any) -> list[Any]:
        linear(x, w, b).backward()
        first = w.grad
        linear(x, w, b).backward()
        second = w.grad
        (x @ w).sum().backward(create_graph=True)
        return [first is second, second is w.grad, second, w.grad.detach()]

    def on_rank(mesh: Any) -> list[Any]:
        return program(*leaves(mesh))

    wanted = program(X, W.clone().requires_grad_(), B.clone().requires_grad_())
    for found in on_ranks(on_rank):
        assert found[:2] == wanted[:2] == [True, False]
        for one, due in zip(found[2:], wanted[2:]):
            torch.testing.assert_close(one.to_local(), due)


def test_a_failed_backward_within_another_takes_nothing_from_it() -> None:
    def on_rank(mesh: Any) -> Any:
        x, w, b = leaves(mesh)
        inner_x, inner_w, inner_b = leaves(mesh)

        def fail(_: Any) -> None:
            raise ArithmeticError

        def hook(_: Any) -> None:
            with torch.enable_grad():
                y = inner_x @ inner_w + inner_b
                z = y * 2
                y.register_hook(fail)
                with pytest.raises(ArithmeticError):
                    (z + inner_b).sum().backward()

        y = x @ w + b
        y.register_hook(hook)
        loss = y.square().mean() + (x @ w).sum()  # one term arrives before the hook
        loss.backward()

        def plain(x: Any, w: Any, b: Any) -> Any:
            return (x @ w + b).square().mean() + (x @ w).sum()

        for found, due in zip((w, b), expected(plain)):
            torch.testing.assert_close(found.grad.to_local(), due)
        assert inner_w.grad is None
        inner_b.grad = None
        linear(inner_x, inner_w, inner_b).backward()
        for found, due in zip((inner_w, inner_b), expected(linear)):
            torch.testing.assert_close(found.grad.to_local(), due)
        return loss.item() if mesh.rank == 0 else None  # known: no collective

    on_ranks(on_rank)


def test_terms_of_an_empty_shard_that_arrive_in_another_order() -> None:
    """Of nothing torch's batch_norm makes another graph: the bias comes before the weight."""
    x, mean, var = torch.arange(24.0).reshape(4, 3, 2).sin(), torch.arange(3.0) / 5, torch.ones(3)

    def program(x: Any, w: Any, b: Any) -> None:
        (F.batch_norm(x, mean, var, w, b) * x).sum().backward()

    def on_rank(mesh: Any) -> Any:
        sizes = weft.Layout(mesh, (4, 3, 2), P("x"), sizes={0: (3, 0, 1)})
        own = [weft.distribute_tensor(torch.ones(3), mesh, P()).requires_grad_() for _ in range(2)]
        program(weft.distribute_tensor(x, mesh, sizes), *own)
        return [one.grad.to_local() for one in own]

    plain = [torch.ones(3, requires_grad=True) for _ in range(2)]
    program(x, *plain)
    for found in on_ranks(on_rank):
        torch.testing.assert_close(found, [one.grad for one in plain])


def test_terms_are_freed_one_by_one_as_they_are_reduced() -> None:
    """At the end of a backward no rank holds two gradients of each parameter."""
    layers, width = 6, 320  # 400 kB each: more than one collective takes

    def on_rank(mesh: Any) -> float:
        model = weft.distribute_module(torch.nn.Sequential(
            *[torch.nn.Linear(width, width, bias=False) for _ in range(layers)]), mesh)
        x = weft.distribute_tensor(torch.ones(1, 6, width), mesh, P(None, "x"))
        with weft.testing.peak_memory(model, x) as memory:
            model(x).sum().backward()
        return memory.peak / (layers * width * width * 4)

    for parameters in weft.testing.run(on_rank, mesh={"x": 3}):
        assert 2 < parameters < 2 + 1.5 / layers
