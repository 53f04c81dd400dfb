"""How far a checkpoint recomputes: as far as torch does, and on all ranks as far in collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _CheckpointFrame, checkpoint, set_checkpoint_early_stop

import weft
from weft import P

X = torch.randn(2, 5, dtype=torch.float64)
V = torch.randn(5, 3, dtype=torch.float64)
W = torch.randn(3, 5, dtype=torch.float64)

Program = Callable[[Any, Any, Any], Any]


def hidden(x: Any, v: Any, w: Any) -> Any:
    return (x @ v).tanh() @ w


def residual(x: Any, v: Any, w: Any) -> Any:
    return x + hidden(x, v, w)


def residual_of_views(x: Any, v: Any, w: Any) -> Any:
    return (x + hidden(x, v, w)).t().view(5, 2).t() - x.view(2, 5)


def two_residuals(x: Any, v: Any, w: Any) -> Any:
    once = residual(x, v, w)
    return once, residual(once, v, w)


def saved(x: Any, v: Any, w: Any) -> Any:
    return residual(x, v, w).sin()


def another_saves(x: Any, v: Any, w: Any) -> Any:
    out = residual(x, v, w)
    return out, x.sin()


def dead_code_saves(x: Any, v: Any, w: Any) -> Any:
    out = residual(x, v, w)
    out.sin()
    return out


def nested(x: Any, v: Any, w: Any) -> Any:
    once = checkpoint(residual, x, v, w, use_reentrant=False)
    return residual(once, v, w)


def nested_last(x: Any, v: Any, w: Any) -> Any:
    return checkpoint(residual, residual(x, v, w), v, w, use_reentrant=False)


def loss_of(program: Program, x: Any, v: Any, w: Any) -> Any:
    outs = checkpoint(program, x, v, w, use_reentrant=False)
    outs = outs if isinstance(outs, tuple) else (outs,)
    return sum((out.square().sum() for out in outs), torch.zeros(()))


def leaves() -> list[torch.Tensor]:
    return [one.clone().requires_grad_() for one in (X, V, W)]


def steps(program: Program, *moved: int, num_ranks: int = 4) -> None:
    """Gradients as in one process, and so many collectives in forward and recomputations."""
    plain = leaves()
    loss_of(program, *plain).backward()

    def on_rank(mesh: Any) -> Any:
        given = [
            weft.distribute_tensor(one, mesh, where).detach().requires_grad_()
            for one, where in zip(leaves(), (P(), P(None, "x"), P("x")))
        ]
        with weft.explain() as log:
            loss = loss_of(program, *given)
            before = len(log.events)
            loss.backward()
        for mine, one in zip(given, plain):
            torch.testing.assert_close(mine.grad.full_tensor(), one.grad)
        again = [one for one in log.events[before:] if one.direction == "forward"]
        return before, len(again)

    # three columns on four ranks: the last one has none
    assert weft.testing.run(on_rank, mesh={"x": num_ranks}) == [moved] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("program, moved", [
    (residual, (1, 0)), (residual_of_views, (1, 0)), (two_residuals, (2, 1)),
    (saved, (1, 1)), (another_saves, (1, 1)), (dead_code_saves, (1, 1)),
    (nested, (2, 1)), (nested_last, (2, 2)),
])
def test_what_is_recomputed(program: Program, moved: tuple[int, int], num_ranks: int) -> None:
    steps(program, *moved, num_ranks=num_ranks)


@pytest.mark.parametrize("where, mesh", [
    ((P("dp"), P(None, "tp"), P("tp")), {"dp": 3, "tp": 2}),
    ((P("tp"), P(None, "tp"), P("tp")), {"tp": 3}),
    ((P("tp"), P(None, "tp"), P("tp")), {"tp": 5}),
])
@pytest.mark.parametrize(
    "program", [residual, residual_of_views, two_residuals, saved, another_saves, nested])
def test_ranks_without_samples_recompute_what_others_do(
    program: Program, where: Any, mesh: dict[str, int]
) -> None:
    """Two samples on three ranks and more."""
    plain = leaves()
    loss_of(program, *plain).backward()

    def on_rank(mesh: Any) -> None:
        given = [
            weft.distribute_tensor(one, mesh, its).detach().requires_grad_()
            for one, its in zip(leaves(), where)
        ]
        loss_of(program, *given).backward()
        for mine, one in zip(given, plain):
            torch.testing.assert_close(mine.grad.full_tensor(), one.grad)

    weft.testing.run(on_rank, mesh=mesh)


def test_where_torch_is_not_to_stop_early() -> None:
    with set_checkpoint_early_stop(False):
        steps(residual, 1, 1)
    whole = partial(checkpoint, use_reentrant=False, early_stop=False)

    def on_rank(mesh: Any) -> int:
        given = [weft.distribute_tensor(one, mesh, where).detach().requires_grad_()
                 for one, where in zip(leaves(), (P(), P(None, "x"), P("x")))]
        with weft.explain() as log:
            whole(residual, *given).sum().backward()
        return sum(one.direction == "forward" for one in log.events)

    assert weft.testing.run(on_rank, mesh={"x": 2}) == [2, 2]


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("program", [residual, hidden, saved])
@pytest.mark.parametrize("where", [(P(), P(None, "x"), P("x")), (P("x"), P(), P())])
def test_the_last_product_is_computed_again_only_by_need(program: Program, where: Any) -> None:
    with Products() as plain:
        loss_of(program, *leaves()).backward()

    def on_rank(mesh: Any) -> int:
        given = [weft.distribute_tensor(one, mesh, its).detach().requires_grad_()
                 for one, its in zip(leaves(), where)]
        with Products() as mine:
            loss_of(program, *given).backward()
        return mine.num

    assert plain.num == 2 + 1 + (program is saved) + 4
    assert weft.testing.run(on_rank, mesh={"x": 2}) == [plain.num] * 2


def test_two_backwards_of_one_graph() -> None:
    def on_rank(mesh: Any) -> Any:
        given = [weft.distribute_tensor(one, mesh, where).detach().requires_grad_()
                 for one, where in zip(leaves(), (P(), P(None, "x"), P("x")))]
        loss = loss_of(residual, *given)
        loss.backward(retain_graph=True)
        once = [one.grad.full_tensor().clone() for one in given]
        loss.backward()
        for one, before in zip(given, once):
            torch.testing.assert_close(one.grad.full_tensor(), 2 * before)

    weft.testing.run(on_rank, mesh={"x": 3})


def test_nested_and_named_arguments() -> None:
    def product(factors: dict[str, Any], scale: float, *, w: Any) -> Any:
        return (factors["x"] @ factors["v"]).tanh() @ w * scale

    def loss(x: Any, v: Any, w: Any) -> Any:
        out = checkpoint(product, {"x": x, "v": v}, 2.0, w=w, use_reentrant=False)
        return out.square().sum()

    plain = leaves()
    loss(*plain).backward()

    def on_rank(mesh: Any) -> None:
        given = [
            weft.distribute_tensor(one, mesh, where).detach().requires_grad_()
            for one, where in zip(leaves(), (P(), P(None, "x"), P("x")))
        ]
        loss(*given).backward()
        for mine, one in zip(given, plain):
            torch.testing.assert_close(mine.grad.full_tensor(), one.grad)

    weft.testing.run(on_rank, mesh={"x": 2})


def test_plain_checkpoints_are_torchs() -> None:
    """Mapped, and traced with fake tensors: nothing is saved beside what torch saves."""
    def program(x: Any) -> Any:
        return checkpoint(
            lambda a: (a @ a).sin() + a, x, use_reentrant=False, preserve_rng_state=False)

    x = torch.randn(2, 3, 3)
    if hasattr(_CheckpointFrame, "save_inputs"):  # torch 2.11 maps no checkpoints
        torch.testing.assert_close(torch.vmap(program)(x), (x @ x).sin() + x)
    with FakeTensorMode():
        fake = torch.randn(3, 3, requires_grad=True)
        program(fake).sum().backward()
        assert fake.grad is not None and fake.grad.shape == (3, 3)


def test_each_result_may_have_a_backward_of_its_own() -> None:
    """The first one does not free what the second one recomputes with."""
    def program(x: Any, v: Any, w: Any) -> Any:
        return x @ v, w @ w.t()

    plain = leaves()
    for out in checkpoint(program, *plain, use_reentrant=False):
        out.sum().backward()

    def on_rank(mesh: Any) -> None:
        given = [weft.distribute_tensor(one, mesh, where).detach().requires_grad_()
                 for one, where in zip(leaves(), (P("x"), P(), P()))]
        for out in checkpoint(program, *given, use_reentrant=False):
            out.sum().backward()
        for mine, one in zip(given, plain):
            torch.testing.assert_close(mine.grad.full_tensor(), one.grad)

    weft.testing.run(on_rank, mesh={"x": 2})


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="since torch 2.13")
def test_what_a_first_call_finds_out_is_not_saved() -> None:
    """Neither when torch's function asks which of its operands need a gradient."""
    x, w, classes = torch.randn(2, 7), torch.randn(3, 7), torch.tensor([2, 0])

    def loss(x: Any, w: Any, classes: Any) -> Any:
        return checkpoint(F.linear_cross_entropy, x, w, classes, use_reentrant=False)

    plain = [one.clone().requires_grad_() for one in (x, w)]
    loss(*plain, classes=classes).backward()

    def on_rank(mesh: Any) -> None:
        mine, weight = (weft.distribute_tensor(one, mesh, where).detach().requires_grad_()
                        for one, where in ((x.clone(), P("x")), (w.clone(), P())))
        loss(mine, weight, weft.distribute_tensor(classes, mesh, P("x"))).backward()
        torch.testing.assert_close(mine.grad.full_tensor(), plain[0].grad)
        torch.testing.assert_close(weight.grad.full_tensor(), plain[1].grad)

    weft.testing.run(on_rank, mesh={"x": 2})


@pytest.mark.parametrize("num_samples, after", [
    (2, nn.Identity()), (2, nn.Tanh()), (3, nn.Identity()), (3, nn.Flatten()), (3, nn.Tanh()),
])
def test_batches_are_counted_again_only_where_torch_does(
    num_samples: int, after: nn.Module
) -> None:
    """Torch's norm of instances counts when all has been saved. Two samples leave a rank without.
    """
    def counted(x: Any, times: int) -> tuple[list[Any], Any]:
        norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        out = checkpoint(nn.Sequential(norm, after), x, use_reentrant=False)
        for _ in range(times):
            out.square().sum().backward(retain_graph=True)
        return [norm.running_mean, norm.running_var], x.grad

    x = torch.arange(num_samples * 10.0).view(num_samples, 2, 5).sin()
    plain = [counted(x.clone().requires_grad_(), times) for times in (1, 2)]

    def on_rank(mesh: Any) -> None:
        for times, (running, grad) in enumerate(plain, 1):
            given = weft.distribute_tensor(x, mesh, P("x")).detach().requires_grad_()
            mine, mine_grad = counted(given, times)
            torch.testing.assert_close(mine, running)
            torch.testing.assert_close(mine_grad.full_tensor(), grad)

    weft.testing.run(on_rank, mesh={"x": 3})


def test_a_function_that_counts_batches_without_gradients() -> None:
    """Its recomputation may end there: what it saves is saved nevertheless."""
    def grads(x: Any) -> list[Any]:
        norm = nn.InstanceNorm1d(2, track_running_stats=True)

        def function(x: Any) -> Any:
            with torch.no_grad():
                norm(x)
            return x + 1

        checkpoint(function, x, use_reentrant=False).square().sum().backward()
        return [norm.running_mean, x.grad]

    x = torch.arange(20.0).view(2, 2, 5).sin()
    mean, grad = grads(x.clone().requires_grad_())

    def on_rank(mesh: Any) -> None:
        mine, mine_grad = grads(weft.distribute_tensor(x, mesh, P("x")).requires_grad_())
        torch.testing.assert_close([mine, mine_grad.full_tensor()], [mean, grad])

    weft.testing.run(on_rank, mesh={"x": 2})
