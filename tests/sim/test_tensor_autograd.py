"""Backward, grad, hooks and modes: the same gradients as on plain tensors, reduced once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from tests.sharded import Make, agree, in_ways
from weft import P, Replicate, ShardTensor

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8
W = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)


def leaf(full: torch.Tensor) -> torch.Tensor:
    return full.clone().requires_grad_()


@contextmanager
def anomalies() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is slow
        with torch.autograd.detect_anomaly(check_nan=False):
            yield


def backward_twice(make: Make) -> Any:
    x = make(X)
    (x * x).sum().backward()
    first = x.grad.clone()
    (x * x).mean().backward()
    return [first, x.grad]


def backward_with_gradient(make: Make) -> Any:
    x = make(X)
    y = x * x
    y.backward(gradient=torch.full((5, 6), 2.0, dtype=X.dtype), retain_graph=True)
    first = x.grad.clone()
    y.backward(make(X, False))
    return [first, x.grad]


def gradients_of_a_batch(make: Make) -> Any:
    """One for each row, of a sharded batch, too; Jacobians are made so."""
    x, unused = make(X), make(X)
    y = (x @ leaf(W)).tanh()
    rows = torch.linspace(-1, 1, 5 * y.numel(), dtype=X.dtype).view(5, *y.shape)
    found = torch.autograd.grad(
        [y, y.sum()], [x, unused], [rows, make(X, False)[:, 0]], is_grads_batched=True,
        allow_unused=True)
    assert found[1] is None
    jacobian = torch.autograd.functional.jacobian(
        lambda x: x.square().sum(1).cos(), x, vectorize=True)
    return [found[0], jacobian]


def backward_of_many(make: Make) -> Any:
    (make(X) * 2).backward()


def backward_wrong_shape(make: Make) -> Any:
    (make(X) * 2).backward(torch.ones(3, 6))


def backward_without_graph(make: Make) -> Any:
    make(X, False).sum().backward()


def backward_of_freed_graph(make: Make) -> Any:
    y = make(X).square().sum()
    y.backward()
    y.backward()


def backward_into_inputs(make: Make) -> Any:
    x, w, t = make(X), make(X), leaf(X[0])
    (x * w * t).sum().backward(inputs=[x])
    untouched = (w.grad is None, t.grad is None)
    (x * w * t).sum().backward(inputs=(t,))
    return [x.grad, untouched, t.grad, w.grad is None]


def backward_of_one_element(make: Make) -> Any:
    x = make(X)
    y = (x * x).sum().view(1, 1)
    y.backward()
    return [x.grad, y.item()]


def functional_backward(make: Make) -> Any:
    x = make(X)
    torch.autograd.backward([(x * x).sum(), x.exp()], [None, torch.ones_like(X)])
    first = x.grad.clone()
    torch.autograd.backward((x * 2).sum())
    torch.autograd.backward(x * 2, grad_tensors=(make(X, False),))
    return [first, x.grad]


def functional_grad(make: Make) -> Any:
    x, w, b = make(X), make(X + 1), leaf(X[0])
    y = (x * w + b).tanh()
    first = torch.autograd.grad(y, [x, w, b], grad_outputs=make(X, False), retain_graph=True)
    return [first, torch.autograd.grad(y.sum(), x), x.grad is None]


def grad_of_unused(make: Make) -> Any:
    x = make(X)
    torch.autograd.grad((x * x).sum(), [x, make(X)])


def grad_of_unused_allowed(make: Make) -> Any:
    x, w = make(X), make(X)
    y = (x * x).sum()
    none = torch.autograd.grad(y, [x, w], allow_unused=True, retain_graph=True)
    return [none, torch.autograd.grad(y, [x, w], materialize_grads=True)]


def grad_of_a_dict(make: Make) -> Any:
    x, w = make(X), make(W)
    found = torch.autograd.grad((x @ w).tanh().sum(), {"x": x, "w": w})
    return [list(found), found["x"], found["w"]]


def grad_of_several_outputs(make: Make) -> Any:
    x, w, b = make(X), make(W), make(W[0])
    loss = (x @ w + b).tanh().sum()
    loss.backward(retain_graph=True)  # b has a gradient, which does not count
    both = torch.autograd.grad([loss, (x * x).mean()], [x, w, b])
    scaled = torch.autograd.grad(x.sum(), x, torch.tensor(3.0, dtype=X.dtype))
    total = x.sum()
    return [both, scaled, torch.autograd.grad(total, total)]


def grad_of_results(make: Make) -> Any:
    """With respect to what is no leaf, and the gradient of that."""
    x, w, b = make(X), make(W), make(X[0])
    h, c = x * 2, b * 2
    first = torch.autograd.grad(((h + c) @ w).tanh().sum(), [h, c, w, x, b], create_graph=True)
    torch.stack([one.square().sum() for one in first]).sum().backward()
    return [first, x.grad, w.grad, b.grad]


def grad_with_an_unused_term(make: Make) -> Any:
    x, w, b = make(X, False), make(W), make(W[0])
    (x @ w + b).sum().backward()
    return torch.autograd.grad((x @ w).tanh().sum(), [w, b], allow_unused=True)


def hessian_vector_products(make: Make) -> Any:
    x, w, v = make(X, False), make(W), make(W + 1, False)
    loss = (x @ w).tanh().square().sum()
    first, = torch.autograd.grad(loss, w, create_graph=True)
    return [
        torch.autograd.grad((first * v).sum(), w, retain_graph=True),
        torch.autograd.grad(first, w, grad_outputs=v),
    ]


def gradient_penalty(make: Make) -> Any:
    w, b, x = make(W), leaf(W[0]), make(X)
    loss = (x @ w + b).tanh().square().mean()
    first, = torch.autograd.grad(loss, x, create_graph=True)
    ((first.norm() - 1) ** 2 + loss).backward()
    return [w.grad, b.grad, x.grad]


def functionals(make: Make) -> Any:
    of = torch.autograd.functional
    x, v = make(X), make(X, False)
    return [
        of.jacobian(lambda a: a.sum(0), x), of.hessian(lambda a: (a**3).sum(), make(X[0])),
        of.vjp(lambda a: (a * a).sum(0), x, make(X[0], False)),
        of.jvp(lambda a: (a * a).sum(0), x, v), of.hvp(lambda a: (a**3).sum(), x, v),
        of.vhp(lambda a: (a**3).sum(), x, v),
    ]


def gradient_set_by_hand(make: Make) -> Any:
    x = make(X)
    x.grad = mine = torch.ones_like(x)
    same = x.grad is mine
    (x * x).sum().backward()
    first = x.grad.clone()
    x.grad = torch.ones_like(X)
    (x * x).sum().backward()
    second = x.grad.clone()
    x.grad.mul_(3)
    x.grad.zero_()
    (x * x).sum().backward()
    held = x.grad
    (x * x).sum().backward()
    third = held is x.grad
    del x.grad
    return [same, mine, first, second, third, held, x.grad is None]


def gradient_of_a_wrong_type(make: Make) -> Any:
    make(X).grad = 3.0


def requires_grad_between(make: Make) -> Any:
    w, v, x = make(W), make(W), make(X, False)
    (x @ w).tanh().sum().backward()
    w.requires_grad_(False)
    off = (x @ w).requires_grad
    w.requires_grad_(True)
    loss = ((x @ w).tanh() * (x @ v)).sum()
    v.requires_grad_(False)
    loss.backward()
    return [w.grad, off, v.grad is None]


def graphs_of_one_leaf(make: Make) -> Any:
    """Two at a time, one kept and freed, one that is dropped, one that fails."""
    w, b, x = make(W), make(W[0]), make(X, False)
    one, other = (x @ w + b).tanh().sum(), (x @ w * 2 + b).exp().sum()
    other.backward()
    first = [w.grad.clone(), b.grad.clone()]
    one.backward(retain_graph=True)
    one.backward()
    with pytest.raises(RuntimeError, match="second time"):
        one.backward()
    dropped = (x @ w).sum()
    del dropped
    with torch.no_grad():
        _ = x @ w
    second = (x @ w + b).sum()
    second.backward(inputs=[b], retain_graph=True)
    second.backward(inputs=[w])
    return [first, w.grad, b.grad]


def second_order_optimizer(make: Make) -> Any:
    w, x = make(W), make(X, False)
    optimizer = torch.optim.LBFGS([w], lr=0.1, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x @ w - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return w


def complex_gradients(make: Make) -> Any:
    x = make(torch.view_as_complex(X.view(5, 3, 2).contiguous()), False).requires_grad_()
    (x * x.conj()).real.sum().backward()
    return x.grad


def view_as_reads_the_shape_alone(make: Make) -> Any:
    x, other = make(X), make(X.view(6, 5))
    y, z = x.view_as(x) * 2, x.reshape_as(other)
    (y.sum() + (z * z).sum()).backward()
    return [y, z, x.grad, other.grad]


def double_backward(make: Make) -> Any:
    x, w = make(X), leaf(W)
    gradient, = torch.autograd.grad((x @ w).tanh().sum(), x, create_graph=True)
    (gradient * gradient).sum().backward()
    return [gradient, x.grad, w.grad, gradient.requires_grad]


def double_backward_of_grad_outputs(make: Make) -> Any:
    x, v = make(X), make(X + 1)
    gradient, = torch.autograd.grad(x * x * x, x, grad_outputs=v, create_graph=True)
    (gradient * gradient).sum().backward()
    return [x.grad, v.grad]


def double_backward_of_plain_grad_outputs(make: Make) -> Any:
    x, v = make(X), leaf(X + 1)
    gradient, = torch.autograd.grad(x * x * x, x, grad_outputs=v, create_graph=True)
    (gradient * gradient).sum().backward()
    return [x.grad, v.grad]


def backward_that_creates_a_graph(make: Make) -> Any:
    x = make(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (x * x * x).sum().backward(create_graph=True)
    first = x.grad
    second, = torch.autograd.grad((first * first).sum(), x)
    x.grad = None
    return [first, second]


def double_backward_through_a_hook(make: Make) -> Any:
    x = make(X)
    x.register_hook(lambda gradient: gradient * gradient)
    gradient, = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    return [gradient, torch.autograd.grad(gradient.sum(), x)]


def hooks(make: Make) -> Any:
    x = make(X)
    seen: list[Any] = []

    def double(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient.clone())
        return gradient * 2

    handle = x.register_hook(double)
    y = x * x
    y.register_hook(lambda gradient: gradient * 3)
    y.sum().backward(retain_graph=True)
    first = x.grad.clone()
    handle.remove()
    x.grad = None
    y.sum().backward()
    return [seen, first, x.grad]


def hook_that_returns_a_plain_tensor(make: Make) -> Any:
    x = make(X)
    x.register_hook(lambda gradient: torch.ones_like(X))
    (x * x).sum().backward()
    return x.grad


def optimizer_in_a_hook(make: Make) -> Any:
    p = nn.Parameter(make(X, False))
    optimizer = torch.optim.SGD([p], 0.1)
    seen = []

    def step(parameter: torch.Tensor) -> None:
        seen.append((parameter is p, parameter.grad.clone()))
        optimizer.step()
        optimizer.zero_grad()

    p.register_post_accumulate_grad_hook(step)
    (p * p).sum().backward()
    return [seen, p, p.grad is None]


def tied_weights(make: Make) -> Any:
    w, x = nn.Parameter(make(X, False)), make(X)
    (F.linear(x, w) @ w).tanh().sum().backward()
    return [w.grad, x.grad]


def tied_plain_weights(make: Make) -> Any:
    w, x = nn.Parameter(X.clone()), make(X)
    (F.linear(x, w) @ w).tanh().sum().backward()
    return [w.grad, x.grad]


def accumulation(make: Make) -> Any:
    x, w = make(X), nn.Parameter(W.clone())
    for k in range(3):
        ((x @ w) * (k + 1)).tanh().sum().backward()
    return [x.grad, w.grad]


def updates_between_forwards(make: Make) -> Any:
    x, w = make(X), nn.Parameter(W.clone())
    losses = []
    for _ in range(3):
        loss = (x @ w).tanh().sum()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            w.sub_(w.grad * 0.1)
        w.grad = None
    return [losses, w]


def writes_through_data(make: Make) -> Any:
    """No backward between the forwards, so nothing has been forgotten."""
    x, w = make(X), make(W)
    outs = [x @ w]
    alias = w.data
    for write in (
        lambda: w.data.mul_(2), lambda: x.data.add_(1), lambda: alias.mul_(3),
        lambda: w.data.t().add_(1), lambda: w.data[2:].zero_(),
        lambda: torch._foreach_add_([w.data, x.data], 1.0), lambda: w.data.copy_(make(W, False)),
        lambda: w.detach().mul_(2),
    ):
        write()
        outs.append(x @ w)
    w.data = w.data * 2
    outs.append(x @ w)
    alias.zero_()
    outs[-1].sum().backward()
    return [*outs, x @ w, w.grad, x.grad]


def writes_through_data_of_plain_tensors(make: Make) -> Any:
    x, b, v = make(X), leaf(X[0]), leaf(X)
    outs = [x + b, x * v]
    b.data.add_(3)
    v.data.mul_(2)
    outs += [x + b, x * v]
    (outs[2] * outs[3]).sum().backward()
    return [*outs, b.grad, v.grad, x.grad]


def writes_through_data_of_a_loss(make: Make) -> Any:
    x = make(X)
    loss = (x * x).sum()
    loss.backward()
    values = [loss.item(), loss.data.item()]
    loss.data.mul_(2)
    return [*values, loss.item(), loss.data.item(), loss.detach().item()]


def detached_and_cloned(make: Make) -> Any:
    x = make(X)
    shared, own = x.detach(), x.clone()
    own.mul_(2)
    (own * own).sum().backward()
    shared.add_(1)
    y = make(X) * 1
    y.detach_()
    return [shared.requires_grad, x, x.grad, y.requires_grad, y.is_leaf]


def in_place_on_a_leaf(make: Make) -> Any:
    make(X).add_(1)


def in_place_on_what_is_saved(make: Make) -> Any:
    y = make(X).exp()
    z = y * y
    y.add_(1)
    z.sum().backward()


def grad_modes(make: Make) -> Any:
    x = make(X)
    with torch.no_grad():
        y = x * 2
        x.mul_(2)
        with torch.enable_grad():
            z = (x * x).sum()
    torch.set_grad_enabled(False)
    off = x * 2
    torch.set_grad_enabled(True)
    z.backward()
    return [y.requires_grad, y, x.requires_grad, x, x.grad, off.requires_grad]


def inference_mode(make: Make) -> Any:
    x, w = make(X), nn.Parameter(W.clone())
    outs = []
    for _ in range(2):
        with torch.inference_mode():
            y = (x @ w).softmax(-1)
            y.add_(1)
            outs += [y.requires_grad, y.is_inference(), y.sum(0).clone()]
        with torch.no_grad():
            w.add_(1)
        outs.append((x @ w).sum())
    outs[-1].backward()
    return [*outs, w.grad, x.grad, x.is_inference()]


def anomaly_mode(make: Make) -> Any:
    x, w = make(X), leaf(W)
    with anomalies():
        ((x * x).sum() + (x @ w).softmax(-1).log().sum()).backward()
    return [x.grad, w.grad]


PROGRAMS = [
    backward_twice, gradients_of_a_batch, backward_with_gradient, backward_of_many,
    backward_wrong_shape, backward_without_graph, backward_of_freed_graph, backward_into_inputs,
    backward_of_one_element, functional_backward, functional_grad, grad_of_unused,
    grad_of_unused_allowed, double_backward, double_backward_of_grad_outputs,
    double_backward_of_plain_grad_outputs, backward_that_creates_a_graph,
    double_backward_through_a_hook, hooks, hook_that_returns_a_plain_tensor, optimizer_in_a_hook,
    tied_weights, tied_plain_weights, accumulation, updates_between_forwards,
    writes_through_data, writes_through_data_of_plain_tensors, writes_through_data_of_a_loss,
    detached_and_cloned, in_place_on_a_leaf, in_place_on_what_is_saved, grad_modes,
    inference_mode, anomaly_mode, grad_of_a_dict, grad_of_several_outputs, grad_of_results,
    grad_with_an_unused_term, hessian_vector_products, gradient_penalty, functionals,
    gradient_set_by_hand, gradient_of_a_wrong_type, requires_grad_between,
    graphs_of_one_leaf, second_order_optimizer, complex_gradients, view_as_reads_the_shape_alone,
]


@pytest.mark.parametrize("program, way", in_ways(PROGRAMS))
def test_autograd(program: Any, way: str) -> None:
    agree(program, way)


def test_anomaly_mode_says_where_the_forward_was() -> None:
    def on_rank(mesh: Any) -> str:
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with torch.autograd.detect_anomaly(check_nan=False):
                loss = (x * x).sum()
                loss.backward()
                with pytest.raises(RuntimeError, match="a second time"):
                    loss.backward()
        return str(said[-1].message)

    for said in weft.testing.run(on_rank, mesh={"x": 2}):
        assert "Traceback of forward call that caused the error" in said
        assert "loss = (x * x).sum()" in said
    assert not torch.is_anomaly_enabled()


NAN_CHECKED: dict[str, Any] = {
    "backward": lambda x: (x * 2).sum().backward(),
    "autograd.grad": lambda x: torch.autograd.grad((x * 2).sum(), x),
    "of a full tensor": lambda x: (x * 2).full_tensor().sum().backward(),
    "between plain tensors": lambda x: between_plain_tensors(x.detach()),
}


def between_plain_tensors(x: Any) -> Any:
    w = torch.ones(X.shape[1]).requires_grad_()
    return torch.autograd.grad((x * w).full_tensor().sum(), w)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", NAN_CHECKED)
def test_a_look_for_nans_is_refused(name: str) -> None:
    """It would raise on the rank that has one, and leave the others waiting."""
    def on_rank(mesh: Any) -> str:
        some = X.clone()
        some[3, 2] = float("nan")
        x = weft.distribute_tensor(some, mesh, P("x")).requires_grad_()
        with torch.autograd.detect_anomaly(), pytest.raises(weft.UnsupportedOpError) as caught:
            NAN_CHECKED[name](x)
        assert x.grad is None
        return str(caught.value)

    first, other = weft.testing.run(on_rank, mesh={"x": 2})
    assert first == other and first.splitlines() == [
        "torch.autograd.detect_anomaly(): a backward of ShardTensors begins, and NaNs are looked "
        "for.",
        "  Rule: a NaN may be in one rank's block alone, and all ranks raise or none.",
        "  Offenders: check_nan=True",
        "  Fix: torch.autograd.detect_anomaly(check_nan=False), for the tracebacks",
        "       of a NaN: x.register_hook(lambda g: print(g.isnan().any().item()))",
    ]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_nans_of_plain_tensors_are_found() -> None:
    x = torch.zeros(3, requires_grad=True)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="SqrtBackward0"):
        (x.sqrt() * 0).sum().backward()
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="SqrtBackward0"):
        torch.autograd.grad((x.sqrt() * 0).sum(), x)


def test_a_plain_parameter_is_reduced_once() -> None:
    def on_rank(mesh: Any) -> list[tuple[str, str]]:
        x = weft.distribute_tensor(X, mesh, P("x"))
        w = nn.Parameter(W.clone())
        with weft.explain() as log:
            loss = ((x @ w).tanh() * (x @ w) + x.exp() @ w).square().mean()
        forward = len(log.events)
        with weft.explain() as log:
            loss.backward()
        assert forward == 0
        expected = leaf(W)
        ((X @ expected).tanh() * (X @ expected) + X.exp() @ expected).square().mean().backward()
        torch.testing.assert_close(w.grad, expected.grad)
        return [(event.direction, event.collective) for event in log.events]

    # The loss's own value, and the parameter's gradient: one all-reduce each.
    due = [("backward", "AllReduce"), ("backward", "AllReduce")]
    assert weft.testing.run(on_rank, mesh={"x": 2}) == [due] * 2


@pytest.mark.parametrize("call", ["method", "function"])
def test_one_rank_prints_the_loss(call: str) -> None:
    def on_rank(mesh: Any) -> list[Any]:
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        loss = (x * x).mean()
        assert loss.sharding.is_partial
        if call == "method":
            loss.backward()
        else:
            torch.autograd.backward([loss])
        if mesh.rank != 0:
            return []
        with weft.explain() as log:
            values = [loss.item(), float(loss.detach()), loss.detach().item(), loss.data.item()]
            text = f"{loss:.3f}"
        assert log.events == []
        return [*values, text]

    due = (X * X).mean().item()
    first, other = weft.testing.run(on_rank, mesh={"x": 2})
    assert other == [] and first[4] == f"{due:.3f}"
    assert first[:4] == pytest.approx([due] * 4)


def _printed_by_one(program: Any) -> list[float]:
    """The numbers that rank 0 alone reads after `program` has given losses and run backward."""
    def on_rank(mesh: Any) -> list[float]:
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        losses = program(x)
        if mesh.rank != 0:
            return []
        with weft.explain() as log:
            numbers = [loss.item() for loss in losses]
        assert log.events == []
        return numbers

    return weft.testing.run(on_rank, mesh={"x": 2})[0]


def test_one_rank_prints_the_loss_before_it_was_scaled() -> None:
    """`(loss / n).backward()`, `scaler.scale(loss).backward()`, sums of losses."""
    def divided(x: torch.Tensor) -> list[torch.Tensor]:
        loss = (x * x).mean()
        (loss / 4).backward()
        return [loss]

    def scaled(x: torch.Tensor) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu")
        loss = (x * x).mean() / 4
        scaler.scale(loss).backward()
        return [loss]

    def summed(x: torch.Tensor) -> list[torch.Tensor]:
        main, other = (x * x).mean(), x.sin().sum()
        total = main + 0.5 * other
        (total / 2).backward()
        return [main, other, total]

    def by_function(x: torch.Tensor) -> list[torch.Tensor]:
        main, other = (x * x).mean(), x.sin().sum()
        torch.autograd.backward([torch.add(main, other, alpha=2), main * 3])
        return [main, other]

    def stacked(x: torch.Tensor) -> list[torch.Tensor]:
        losses = [(x * x).mean(), x.sin().sum(), x.cos().mean()]
        (torch.stack(losses).sum() / 3).backward()
        return losses

    def from_nothing(x: torch.Tensor) -> list[torch.Tensor]:
        losses = [(x * x).mean(), x.sin().sum()]
        (sum(losses, 0.0) / 2).backward()
        return losses

    for program in (divided, scaled, summed, by_function, stacked, from_nothing):
        due = [loss.item() for loss in program(X.clone().requires_grad_())]
        assert _printed_by_one(program) == pytest.approx(due)


def test_losses_before_scaling_ride_with_the_gradients() -> None:
    """They take no collective of their own, and a loop of sums keeps none but the last."""
    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P("x"))
        w = weft.distribute_tensor(X[:1].clone(), mesh, P()).requires_grad_()
        loss = (x * w).mean()
        with weft.explain() as log:
            (loss / 2).backward()
        total = 0.0
        for _ in range(50):
            total = total + (x * w).mean()
        return [event.collective for event in log.events], len(total._terms)

    for moved, kept in weft.testing.run(on_rank, mesh={"x": 2}):
        assert set(moved) == {"AllReduce"} and kept == 8


def test_a_loss_that_is_written_after_its_use_is_not_known_by_its_old_value() -> None:
    def on_rank(mesh: Any) -> float:
        loss = weft.distribute_tensor(X, mesh, P("x")).requires_grad_().sum()
        scaled = loss / 4
        with torch.no_grad():
            loss.mul_(2)
        scaled.backward()
        return loss.detach().item()

    assert weft.testing.run(on_rank, mesh={"x": 2}) == pytest.approx([2 * X.sum().item()] * 2)


def test_a_known_value_is_forgotten_when_it_changes() -> None:
    def on_rank(mesh: Any) -> float:
        loss = weft.distribute_tensor(X, mesh, P("x")).requires_grad_().sum()
        loss.backward()
        with torch.no_grad():
            loss.mul_(2)
        return loss.detach().item()

    assert weft.testing.run(on_rank, mesh={"x": 2}) == pytest.approx([2 * X.sum().item()] * 2)


def test_explicit_results_are_the_users_own() -> None:
    """Writing to what redistribute or full_tensor gave reaches neither the source nor a memo."""
    def on_rank(mesh: Any, spec: P) -> None:
        x = weft.distribute_tensor(X, mesh, spec).requires_grad_()
        for target in ([Replicate()], [weft.Shard(1)], x.placements):
            y = x.redistribute(placements=target)
            y.add_(1)
            z = x.full_tensor()
            z.mul_(0)
            again = x.redistribute(placements=target).full_tensor()
            assert torch.equal(again.detach(), X) and torch.equal(x.detach().full_tensor(), X)
            x.grad = None
            ((y * y).sum() + (x.sum(0) ** 2).sum() + z.sum()).backward()
            expected = leaf(X)
            (((expected + 1) ** 2).sum() + (expected.sum(0) ** 2).sum()).backward()
            torch.testing.assert_close(x.grad.full_tensor(), expected.grad)
        with torch.no_grad():
            x.redistribute(placements=x.placements).zero_()
            x.full_tensor().zero_()
        assert torch.equal(x.detach().full_tensor(), X)

    for spec in (P("x"), P(), P(None, "x"), P(partial={"x": "sum"})):
        weft.testing.run(lambda mesh, spec=spec: on_rank(mesh, spec), mesh={"x": 2})


def test_gradients_have_the_dual_layout() -> None:
    def on_rank(mesh: Any) -> list[str]:
        seen: list[str] = []
        for spec in (P("dp", "tp"), P(), P("dp", partial={"tp": "sum"})):
            x = weft.distribute_tensor(X, mesh, spec).requires_grad_()
            x.register_hook(lambda gradient: seen.append(str(gradient.sharding)))
            (x * x).sum().backward()
            assert type(x.grad) is ShardTensor
            seen.append(str(x.grad.sharding))
        return seen

    due = ["[5@dp, 6@tp]", "[5@dp, 6@tp]", "[5, 6]", "[5, 6]", "[5@dp, 6]", "[5@dp, 6]"]
    assert weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2}) == [due] * 4


def test_two_graphs_share_a_leaf_that_came_along_with_another_operand() -> None:
    """Backward of one frees what leads to its own operands, not what the leaf became."""
    def on_rank(mesh: Any) -> torch.Tensor:
        w, a, b = (weft.distribute_tensor(full, mesh, P("x")).requires_grad_() for full in WAB)
        one = torch.linalg.solve(a.exp(), w).sum()  # both are gathered, in one node if both can be
        other = torch.linalg.solve(b.exp(), w).sum()
        one.backward()
        other.backward()
        return w.grad.full_tensor()

    WAB = [torch.eye(4, dtype=torch.float64) * (place + 1) for place in range(3)]
    w, a, b = (full.clone().requires_grad_() for full in WAB)
    (torch.linalg.solve(a.exp(), w).sum() + torch.linalg.solve(b.exp(), w).sum()).backward()
    for grad in weft.testing.run(on_rank, mesh={"x": 2}):
        torch.testing.assert_close(grad, w.grad)
