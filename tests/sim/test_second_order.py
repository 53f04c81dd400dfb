"""Gradients of gradients equal the one-process ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import weft
from tests.cases import Case, Trial, case, positives, reals, seed_of, trials_of
from tests.harness import held, local_part
from tests.oracle import Held, check
from weft import P, ShardTensor
from weft.core import Layout, Mesh

CASES: list[Case] = [
    case("cube", lambda a: a**3, reals(7, 3)),
    case("products", lambda a, b: (a * b * b).tanh(), reals(6, 5), reals(5)),
    case("matmul", lambda a, b: torch.tanh(a @ b), reals(6, 5), reals(5, 4)),
    case("linear", lambda x, w, b: F.linear(x, w, b).square(), reals(6, 5), reals(4, 5), reals(4)),
    case("softmax", lambda a: F.softmax(a, -1).square(), reals(4, 6)),
    case("mean", lambda a: (a - a.mean(0, keepdim=True)).square().mean(), reals(7, 3)),
    case("log", lambda a: a.log().sum(1), positives(7, 3)),
    case("views", lambda a: a.t().reshape(2, -1).narrow(1, 1, 4).square(), reals(6, 2)),
    case("batch_norm", lambda a, w, b: F.batch_norm(a, None, None, w, b, True).square(),
         reals(5, 4, 3), reals(4), reals(4)),
    case("batch_norm_evaluated", lambda a, w: F.batch_norm(
        a, torch.zeros(4).double(), torch.ones(4).double(), w).square(), reals(5, 4), reals(4)),
    case("group_norm", lambda a, w: F.group_norm(a, 2, w).square(), reals(5, 6, 3), reals(6)),
    case("instance_norm", lambda a, w: F.instance_norm(a, weight=w).square(), reals(5, 4, 6),
         reals(4)),
    case("layer_norm", lambda a, w: F.layer_norm(a, (6,), w).square(), reals(5, 6), reals(6)),
    case("conv1d", lambda a, w, b: F.conv1d(a, w, b).square(), reals(5, 4, 6), reals(3, 4, 2),
         reals(3)),
    case("cumprod", lambda a: a.cumprod(0), reals(7, 3)),
    case("logcumsumexp", lambda a: a.logcumsumexp(0), reals(7, 3)),
    case("cummax", lambda a: a.square().cummax(0)[0], reals(7, 3)),
    case("max_pool1d", lambda a: F.max_pool1d(a.square(), 2).square(), reals(5, 4, 6)),
]


def penalty(operands: list[Tensor], fn: Any) -> list[Tensor]:
    """The gradients of the squared norm of the gradients of `fn`."""
    leaves = [one.requires_grad_() for one in operands]
    first = torch.autograd.grad(fn(*leaves).sum(), leaves, create_graph=True)
    squares = torch.stack([one.square().sum() for one in first])
    return list(torch.autograd.grad(squares.sum(), leaves))


def on_rank(trial: Trial, mesh: Any) -> list[Held]:
    """The second-order gradients as one rank has them."""
    operands = [
        dense if layout is None else ShardTensor.from_local(
            local_part(layout, dense, mesh.here, seed_of(trial.id, place)), mesh, layout
        )
        for place, (dense, layout) in enumerate(zip(trial.case.tensors(), trial.layouts))
    ]
    return [held(one) for one in penalty(operands, trial.case.fn)]


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_second_order(trial: Trial) -> None:
    mesh = dict(trial.axes)
    of_ranks = weft.testing.run(lambda on: on_rank(trial, on), Mesh(mesh).size(), mesh)
    for place, expected in enumerate(penalty(trial.case.tensors(), trial.case.fn)):
        # A gradient has the strides of its tensor; torch's may have those of the last view.
        expected = expected.contiguous()
        check(expected, [results[place] for results in of_ranks], f"{trial.id}: {place}")


@pytest.mark.parametrize("name", ["cummax", "cummin", "cumsum", "cumprod", "logcumsumexp"])
def test_scans_where_another_dim_is_on_some_ranks(name: str) -> None:
    """Of blocks without elements: the gradient of cummax, for one, is torch's operand itself."""
    full = positives(3, 3).make(torch.Generator().manual_seed(0))
    axes = {"dp": 3, "tp": 2}
    layout = Layout(Mesh(axes), (3, 3), P("tp", "dp"), sizes={1: (0, 0, 3)})

    def penalty_of(a: Tensor) -> Tensor:
        scanned = getattr(a, name)(0)
        lines = scanned if isinstance(scanned, Tensor) else scanned.values
        out = lines.trace().square() + lines.square().sum()
        first, = torch.autograd.grad(out, a, create_graph=True)
        return torch.autograd.grad(first.square().sum(), a)[0]

    def of_rank(mesh: Any) -> Held:
        made = ShardTensor.from_local(local_part(layout, full, mesh.here, 0), mesh, layout)
        return held(penalty_of(made.requires_grad_()))

    check(penalty_of(full.clone().requires_grad_()), weft.testing.run(of_rank, mesh=axes), name)


def added_row(a: Tensor) -> Tensor:
    lines = a.sin()
    lines[1] += lines[0]
    return lines.sin()


def reshaped_row(a: Tensor) -> Tensor:
    row = a[[4, 3, 2], 0]
    box = row.reshape(3, 1, 1)
    box.unsqueeze_(0)
    return box.sin() + row * box


def cleared_row(a: Tensor) -> Tensor:
    row = a[[4, 3, 2], 0]
    row[-1].zero_()
    return torch.addcmul(a[:, 0], row[0:1], a[:, 0], value=2.0)


def convolved(a: Tensor) -> Tensor:
    """Nothing has a gradient in the graph of the convolution's, which requires one."""
    lines = F.conv1d(a[[4, 3, 2]][:, None], torch.ones(1, 1, 2, dtype=a.dtype))
    return torch.cat([lines.flatten(), a.sin().flatten()])


def recomputed(a: Tensor) -> Tensor:
    return checkpoint(lambda v: torch.stack([row.sin() for row in v]), a, use_reentrant=False)


def recomputed_in_another(a: Tensor) -> Tensor:
    return checkpoint(lambda v: recomputed(v.exp()).tanh(), a, use_reentrant=False)


@pytest.mark.parametrize(
    "fn", [
        added_row, reshaped_row, cleared_row, convolved, recomputed, recomputed_in_another])
@pytest.mark.parametrize("sizes", [{}, {0: (0, 5, 0, 0, 0)}])
def test_rows_that_are_written_to(fn: Any, sizes: Any) -> None:
    """Autograd makes their views again. Of views without elements it would lose edges. What
    checkpoints have recomputed stays: not all ranks would ask for it a second time."""
    full = reals(5, 3).make(torch.Generator().manual_seed(0))
    layout = Layout(Mesh({"x": 5}), (5, 3), P("x"), sizes=sizes)

    def of_rank(mesh: Any) -> Held:
        made = ShardTensor.from_local(local_part(layout, full, mesh.here, 0), mesh, layout)
        return held(penalty([made], fn)[0])

    check(penalty([full.clone()], fn)[0], weft.testing.run(of_rank, mesh={"x": 5}), fn.__name__)


def repeated_wall(a: Tensor) -> Tensor:
    walls = a[:1].expand(3, -1)
    a[-1] = a[-2]
    return walls


def broadcast_column(a: Tensor) -> Tensor:
    column = torch.broadcast_to(a[:, :1], a.shape)
    a[:, -1] = 0
    return column


def broadcast_row(a: Tensor) -> Tensor:
    _, row = torch.broadcast_tensors(a, a[-1:])
    a.mul_(0.5)
    return row


def windows(a: Tensor) -> Tensor:
    found = a.unfold(0, 3, 1)
    a[-1] = a[0] * 2
    return found


def windows_of_a_column(a: Tensor) -> Tensor:
    found = a[:, 2].unfold(0, 2, 1)
    a[:, 2] *= 2
    return found


@pytest.mark.parametrize(
    "fn", [repeated_wall, broadcast_column, broadcast_row, windows, windows_of_a_column])
@pytest.mark.parametrize("spec", [P("x"), P("y", "x"), P(None, "x")], ids=str)
def test_views_that_moved_and_follow_a_write(fn: Any, spec: P) -> None:
    """Elements that share memory take their gradient once, and their graph is that of the ranks
    that hold none of them."""
    def grads(x: Any) -> list[Any]:
        base = x * 1
        view = fn(base)
        first = torch.autograd.grad((view**3).sum() + (base**3).sum(), x, create_graph=True)
        return [*first, *torch.autograd.grad(first[0].square().sum(), x)]

    full = reals(5, 4).make(torch.Generator().manual_seed(0))
    expected = grads(full.clone().requires_grad_())

    def on_rank(mesh: Any) -> None:
        found = grads(weft.distribute_tensor(full, mesh, spec).requires_grad_())
        for grad, due in zip(found, expected):
            torch.testing.assert_close(grad.full_tensor(), due)

    weft.testing.run(on_rank, mesh={"x": 4, "y": 2} if "y" in spec else {"x": 4})


@pytest.mark.parametrize("fn", [
    lambda x: F.nll_loss(x, torch.zeros(4, dtype=torch.int64)),
    lambda x: F.pad(x[None], (1, 1), mode="reflect"),
    lambda x: F.pad(x[None], (0, 2), mode="replicate"),
], ids=["nll_loss", "reflect", "replicate"])
def test_a_penalty_of_gradients_that_are_constant(fn: Any) -> None:
    """In torch these require a gradient, which is zero: so they do on all ranks, or all ranks but
    those without elements would leave out its collectives."""
    def penalized(x: Any) -> Any:
        loss = fn(x * 1).sum()
        grad, = torch.autograd.grad(loss, x, create_graph=True)
        (loss + (grad * grad).sum()).backward()
        return grad.requires_grad, x.grad

    full = torch.arange(24.0).view(4, 6)
    expected = penalized(full.clone().requires_grad_())

    def on_rank(mesh: Any) -> None:
        layout = Layout(mesh, (4, 6), P(None, "x"), sizes={1: (0, 3, 0, 3)})
        x = weft.distribute_tensor(full, mesh, layout).requires_grad_()
        wants, grad = penalized(x)
        assert wants == expected[0] and torch.equal(grad.full_tensor(), expected[1])

    weft.testing.run(on_rank, mesh={"x": 4})


def test_a_penalty_of_the_gradients_of_a_norm() -> None:
    """The norm over shards has other derivatives than torch's op: that of a bias depends on
    nothing. A rank without elements has the same."""
    def penalized(*given: Any) -> list[Any]:
        loss = (F.layer_norm(given[0], (4,), *given[1:]) * torch.arange(4.0)).sum()
        grads = torch.autograd.grad(loss, given, create_graph=True)
        sum([(grad * grad).sum() for grad in grads], loss).backward()
        return [one.grad for one in given]

    full = [torch.arange(12.0).view(3, 4).sin().double(), *torch.eye(4)[:2].double()]
    expected = penalized(*[one.clone().requires_grad_() for one in full])

    def on_rank(mesh: Any) -> None:
        found = penalized(*[
            weft.distribute_tensor(one, mesh, spec).requires_grad_()
            for one, spec in zip(full, (P(None, "x"), P("x"), P("x")))])
        for grad, due in zip(found, expected):
            torch.testing.assert_close(grad.full_tensor(), due)

    weft.testing.run(on_rank, mesh={"x": 5})
