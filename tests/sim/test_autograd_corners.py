"""Corners of autograd: roots, leaves, modes, versions, graphs that are looked at; as on plain
tensors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from tests.sharded import WAYS, Make, agree, in_ways
from weft import P

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8
W = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)
B = torch.linspace(-1, 2, 6, dtype=torch.float64)
ONE = torch.tensor(1.0, dtype=torch.float64)


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def leaf(full: Tensor) -> Tensor:
    return full.clone().requires_grad_()


# Roots.


def counts_of_elements(make: Make) -> Any:
    """Norms of order 0 have a node, and no gradient: on no rank, also not on one that has none."""
    x = make(X)
    torch.linalg.vector_norm(x, 0, dim=0).sum().backward()
    torch.linalg.vector_norm(x, 0).backward()
    return [x.grad is None]


def gradients_of_a_partial_loss(make: Make) -> Any:
    x, w = make(X), make(W)
    loss = (x @ w).tanh().sum()
    loss.backward(gradient=ONE * 2.5, retain_graph=True)
    first = x.grad.clone()
    loss.backward(gradient=make(ONE / 2, False), retain_graph=True)
    loss.view(1).backward(gradient=ONE.view(1) * 2)
    return [first, x.grad, w.grad]


def one_element_on_one_rank(make: Make) -> Any:
    x = make(X)
    y = x[4:5, 5:6] * 3
    y.backward()
    z = (x * x).narrow(0, 0, 1).narrow(1, 2, 1)
    z.backward(retain_graph=True)
    z.squeeze().backward()
    return [x.grad, y.item(), z.item()]


def gradient_of_another_dtype(make: Make) -> Any:
    x = make(X)
    (x * 2).backward(torch.ones(5, 6))
    return x.grad


def several_roots(make: Make) -> Any:
    x, w = make(X), make(W)
    a, b = x @ w, x * 3
    torch.autograd.backward((a, b.sum()), (torch.ones_like(a), None))
    loss = (x * x).sum()
    torch.autograd.backward([loss, loss])
    return [x.grad, w.grad]


def results_as_inputs(make: Make) -> Any:
    x = make(X)
    y = x * 2
    (y * y).sum().backward(inputs=[y])
    return [x.grad is None, y.grad]


def no_inputs(make: Make) -> Any:
    (make(X) * 2).sum().backward(inputs=[])


def a_cut_in_the_graph(make: Make) -> Any:
    x = make(X)
    y = x * 2
    held = y.detach().requires_grad_()
    (held * held).sum().backward()
    y.backward(held.grad)
    z = torch.where(x > 2, x, x.detach() * 3)
    z.sum().backward()
    return [x.grad, held.grad]


def roots_without_graph(make: Make) -> Any:
    x = make(X, False)
    torch.autograd.grad(x.sum(), x)


def an_input_that_wants_none(make: Make) -> Any:
    x, w = make(X, False), make(W)
    torch.autograd.grad((x @ w).sum(), x)


def gradients_of_other_number(make: Make) -> Any:
    x = make(X)
    torch.autograd.grad([x * 2, x * 3], [x], [torch.ones_like(X)])


def a_loss_with_a_plain_factor(make: Make) -> Any:
    x, t = make(X), leaf(ONE * 3)
    (x.sum() * t).backward()
    return [x.grad, t.grad]


# Orders.


def third_order(make: Make) -> Any:
    x = make(X)
    first, = torch.autograd.grad((x**4).sum(), x, create_graph=True)
    second, = torch.autograd.grad(first.sum(), x, create_graph=True)
    return [first, second, torch.autograd.grad(second.sum(), x)]


def constant_gradients(make: Make) -> Any:
    """They have no gradient of their own: on no rank, also not on one that has no elements."""
    x, w, found = make(X), make(W), []
    for step in (torch.sign, torch.round, lambda a: torch.copysign(x * 2, a), torch.trunc,
                 lambda a: torch.div(a, x, rounding_mode="floor")):
        y = step(x * 1)
        one, = torch.autograd.grad((y @ w).square().sum(), x, create_graph=True)
        other, = torch.autograd.grad((y * y).sum(0).amax(), x, create_graph=True)
        found += [one, other]
        for seen in (one, other):
            if seen.requires_grad:
                found += torch.autograd.grad((seen * x).sum(), x, retain_graph=True)
    return [one.requires_grad for one in found] + found


def graphs_that_accumulate(make: Make) -> Any:
    x = make(X)
    with silence():
        (x**3).sum().backward(create_graph=True)
        (x**2).sum().backward(create_graph=True)
    held = x.grad
    second = torch.autograd.grad(held.sum(), x)
    x.grad = None
    return [held, second]


def plain_and_sharded_inputs(make: Make) -> Any:
    x, t = make(X), leaf(W)
    first = torch.autograd.grad((x @ t).tanh().sum(), [t, x], create_graph=True)
    squares = (first[0] ** 2).sum() + (first[1] ** 2).sum()
    return [first, torch.autograd.grad(squares, [t, x])]


def steps_within_the_graph(make: Make) -> Any:
    """As in MAML."""
    x, w = make(X, False), make(W)
    moved = w
    for _ in range(2):
        found, = torch.autograd.grad((x @ moved).tanh().square().mean(), moved, create_graph=True)
        moved = moved - 0.1 * found
    (x @ moved).sum().backward()
    return w.grad


def a_hook_in_the_graph(make: Make) -> Any:
    x, seen = make(X), []
    y = x * x
    y.register_hook(lambda g: (seen.append(g.requires_grad), g * x)[1])
    first, = torch.autograd.grad(y.sum(), x, create_graph=True)
    first.sum().backward()
    return [seen, x.grad]


# Plain parameters.


def plain_parameters_of_several_ops(make: Make) -> Any:
    x, y, w, b = make(X), make(X.flip(0)), leaf(W), leaf(B)
    z = ((x + b) @ w).tanh() + ((y * b) @ w).exp() + w.sum() * b.sum()
    z.mean().backward()
    first = [w.grad.clone(), b.grad.clone()]  # type: ignore[union-attr]
    ((x @ w).sum() + (w * w).sum()).backward()
    return [first, w.grad, b.grad, x.grad]


def views_of_one_plain_parameter(make: Make) -> Any:
    x, p = make(X), nn.Parameter(torch.cat([W.flatten(), B]))
    ((x * p[18:]) @ p[:18].view(6, 3)).tanh().sum().backward()
    return [p.grad, x.grad]


def retained_plain_result(make: Make) -> Any:
    x, w, seen = make(X), leaf(W), []
    v = w * 2
    v.retain_grad()
    v.register_hook(lambda g: seen.append(g.clone()))
    ((x @ v).tanh().sum() + v.sum()).backward()
    return [v.grad, w.grad, seen, x.grad]


# Leaves and results.


def requires_grad_of_a_result_off(make: Make) -> Any:
    (make(X) * 2).requires_grad_(False)


def requires_grad_of_results(make: Make) -> Any:
    x, c = make(X), make(X, False)
    y = (x * 2).requires_grad_()
    (y * y).sum().backward()
    z = c * 2
    z.requires_grad_()
    z.requires_grad = True
    (z * z).sum().backward()
    return [y.is_leaf, x.grad, z.is_leaf, z.grad, c.grad is None]


def requires_grad_of_integers(make: Make) -> Any:
    make(torch.arange(6), False).requires_grad_()


def leaves_are_written_without_grad(make: Make) -> Any:
    x = make(X)
    with torch.no_grad():
        x.add_(1)
        x.mul_(x)
        x[0] = 0
        x.clamp_(0, 3)
        x.copy_(make(X, False) * 2)
    (x * x).sum().backward()
    return [x, x.grad, x.is_leaf, x.requires_grad]


def leaves_are_not_written_with_grad(make: Make) -> Any:
    found = []
    for write in (
        lambda x: x.mul_(2), lambda x: x.zero_(), lambda x: x.__setitem__(0, 1.0),
        lambda x: x.view(-1).mul_(2), lambda x: x.copy_(X), lambda x: x.t().zero_(),
        lambda x: torch.add(x, 1, out=x), lambda x: torch.relu_(x), lambda x: x.fill_(1),
        lambda x: x.unsqueeze(0).add_(1), lambda x: x.split(2)[0].add_(1),
        lambda x: x[0].add_(1), lambda x: x.unbind()[0].add_(1),
    ):
        x = make(X)
        with pytest.raises(RuntimeError):
            write(x)
        found += [x, x.requires_grad]
    return found


def copies_of_leaves(make: Make) -> Any:
    x = make(X)
    (x * x).sum().backward()
    y = copy.deepcopy(x)
    return [y.requires_grad, y.is_leaf, y.grad, y]


def copies_of_results(make: Make) -> Any:
    copy.deepcopy(make(X) * 2)


def gradient_of_a_result_is_asked(make: Make) -> Any:
    y = make(X) * 2
    y.sum().backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        none = y.grad is None
    return [none, [one.category.__name__ for one in said]]


def gradients_in_another_layout(make: Make) -> Any:
    x = make(X)
    x.grad = make(X, False) * 2
    (x * 2).sum().backward()
    return x.grad


def gradients_set_to_zero(make: Make) -> Any:
    x, w, found = nn.Parameter(make(X, False)), nn.Parameter(make(W, False)), []
    optimizer = torch.optim.SGD([x, w], 0.1, momentum=0.9)
    for none in (True, False, True):
        (x @ w).tanh().sum().backward()
        found += [x.grad.clone(), w.grad.clone()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad(set_to_none=none)
        found.append(x.grad is None)
    return [found, x, w]


def accumulated_and_scaled(make: Make) -> Any:
    x, w = make(X), make(W)
    for k in range(4):
        (((x * (k + 1)) @ w).tanh().mean() / 4).backward()
        if k == 1:
            with torch.no_grad():
                w.grad.mul_(0.5)
    return [x.grad, w.grad]


def views_of_a_leaf(make: Make) -> Any:
    x = make(X)
    part = x[1:3]
    (x.view(-1).sum() + (part * part).sum() + x.t().exp().mean()).backward()
    return x.grad


# Hooks.


def hooks_that_write(make: Make) -> Any:
    x, y = make(X), make(X)
    x.register_hook(lambda g: g.mul_(2))
    y.register_hook(lambda g: (g.mul_(2), None)[1])
    z = x * 3
    z.register_hook(lambda g: (g.clamp_(max=0.5), None)[1])
    ((z * z) + y * y).sum().backward()
    return [x.grad, y.grad]


def accumulation_hooks_that_write(make: Make) -> Any:
    x, w, v, seen = make(X), make(W), make(X), []
    for p in (x, w):
        p.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])

    def take(p: Tensor) -> None:
        seen.append(p.grad.clone())  # type: ignore[union-attr]
        p.grad = None

    v.register_post_accumulate_grad_hook(take)
    for _ in range(2):
        ((x @ w).tanh().sum() + (v * v).sum()).backward()
    return [x.grad, w.grad, seen, v.grad is None]


def hook_of_what_wants_none(make: Make) -> Any:
    make(X, False).register_hook(lambda g: g)


def hooks_of_several_over_calls(make: Make) -> Any:
    x, w, seen = make(X), make(W), []
    handle = graph.register_multi_grad_hook(
        [x, w], lambda gs: seen.append([g if g is None else g.clone() for g in gs])
    )
    (x @ w).sum().backward()
    (x * 2).sum().backward()
    torch.autograd.grad((x @ w).sum(), [x, w])
    handle.remove()
    (x @ w).sum().backward()
    return [seen]


def module_with_hooks_that_writes(make: Make) -> Any:
    class AddsOne(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    module = AddsOne()
    module.register_full_backward_hook(lambda *_: None)
    module(make(X) * 1)


def hooks_of_a_checkpointed_module(make: Make) -> Any:
    linear, x, seen = nn.Linear(6, 3).double(), make(X), []
    with torch.no_grad():
        linear.weight.copy_(W.t())
        linear.bias.zero_()
    linear.register_full_backward_hook(lambda _, i, o: seen.append(o[0].clone()))
    checkpoint(linear, x * 1, use_reentrant=False).square().sum().backward()
    return [seen, x.grad, linear.weight.grad]


# Modes.


def modes_as_decorators(make: Make) -> Any:
    x = make(X)
    off, on, inference = torch.no_grad(), torch.enable_grad(), torch.inference_mode()
    with torch.no_grad():
        y = on(lambda a: a * 2)(x)
    z = inference(lambda a: a * 2)(x)
    return [off(lambda a: a * 2)(x).requires_grad, y.requires_grad, z.requires_grad,
            z.is_inference()]


def backward_in_other_modes(make: Make) -> Any:
    x = make(X)
    one, other, third = (x * x).sum(), (x * x).sum(), x.exp().sum()
    with torch.no_grad():
        one.backward()
    with torch.inference_mode():
        other.backward()
    with torch.autograd.set_multithreading_enabled(False):
        third.backward()
    return x.grad


def anomaly_without_nan_check(make: Make) -> Any:
    x = make(X * 0)
    with silence(), torch.autograd.set_detect_anomaly(True, check_nan=False):
        (x.sqrt() * 0).sum().backward()
    return x.grad


def saved_and_written_to(make: Make) -> Any:
    x, w = make(X), make(W)
    with graph.allow_mutation_on_saved_tensors():
        y = x * 2
        z = (y * y) @ w
        y.add_(1)
        s = y.exp()
        s.zero_()
        (z.sum() + s.sum()).backward()
    return [x.grad, w.grad, y]


def checkpoint_kept_reentrant(make: Make) -> Any:
    x = make(X)
    loss = checkpoint(lambda a: a.tanh() * a, x, use_reentrant=True).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad


def checkpoint_debugged(make: Make) -> Any:
    x = make(X)
    checkpoint(lambda a: a.tanh() * a, x, use_reentrant=False, debug=True).sum().backward()
    return x.grad


def checkpoint_without_inputs_that_want(make: Make) -> Any:
    x, w = make(X, False), make(W)
    with silence():
        y = checkpoint(lambda a: (a @ w).tanh(), x, use_reentrant=True)
    return [y, y.requires_grad]


# Graphs that are looked at.


def walked_graph(make: Make) -> Any:
    x, w = make(X), make(W)
    y = x * 2
    z = (x @ w).sum()
    nodes, count = [z.grad_fn], 0
    while nodes and count < 100:
        node = nodes.pop()
        count += 1
        if node is not None:
            assert isinstance(node, graph.Node) and node.name() and node.metadata == {}
            nodes += [following for following, _ in node.next_functions]
    return [y.grad_fn is not None, x.grad_fn is None, x.is_leaf, y.is_leaf, y.output_nr, count > 1]


# Functions.


def function_with_too_few_gradients(make: Make) -> Any:
    class TooFew(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return x + y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    TooFew.apply(make(X), make(X)).sum().backward()  # type: ignore[attr-defined]


def function_without_backward(make: Make) -> Any:
    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    NoBackward.apply(make(X)).sum().backward()  # type: ignore[attr-defined]


def function_with_zeros_for_what_nothing_uses(make: Make) -> Any:
    seen = []

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return x * 1, (x * 2,)[0]

        @staticmethod
        def backward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
            seen.append([one.sum().item(), other.sum().item()])
            return one

    x = make(X)
    out = Two.apply(x)
    out[0].sum().backward()  # type: ignore[index]
    return [type(out).__name__, seen, x.grad]


def function_of_a_freed_graph(make: Make) -> Any:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            x, = ctx.saved_tensors
            return grad * x * 2

    loss = Square.apply(make(X)).sum()  # type: ignore[attr-defined]
    loss.backward()
    loss.backward()


PROGRAMS = [
    gradients_of_a_partial_loss, one_element_on_one_rank, gradient_of_another_dtype, several_roots,
    results_as_inputs, no_inputs, a_cut_in_the_graph, roots_without_graph,
    an_input_that_wants_none, gradients_of_other_number, a_loss_with_a_plain_factor, third_order,
    constant_gradients, graphs_that_accumulate, plain_and_sharded_inputs,
    steps_within_the_graph, a_hook_in_the_graph,
    plain_parameters_of_several_ops, views_of_one_plain_parameter, retained_plain_result,
    requires_grad_of_a_result_off, requires_grad_of_results, requires_grad_of_integers,
    leaves_are_written_without_grad, leaves_are_not_written_with_grad, copies_of_leaves,
    copies_of_results, gradient_of_a_result_is_asked, gradients_in_another_layout,
    gradients_set_to_zero, accumulated_and_scaled, views_of_a_leaf, hooks_that_write,
    accumulation_hooks_that_write, hook_of_what_wants_none, hooks_of_several_over_calls,
    module_with_hooks_that_writes, hooks_of_a_checkpointed_module, modes_as_decorators,
    backward_in_other_modes, anomaly_without_nan_check, saved_and_written_to,
    checkpoint_kept_reentrant, checkpoint_debugged, checkpoint_without_inputs_that_want,
    walked_graph, function_with_too_few_gradients,
    function_without_backward, function_with_zeros_for_what_nothing_uses,
    function_of_a_freed_graph, counts_of_elements,
]


@pytest.mark.parametrize("program, way", in_ways(PROGRAMS))
def test_corners(program: Any, way: str) -> None:
    agree(program, way)


@pytest.mark.parametrize("way", [way for way in WAYS if "partial" not in way])
def test_writes_that_torch_is_told_of(way: str) -> None:
    """A kernel of the user's own writes, and says so: what was saved is no longer true. (Of terms
    the reduced value was saved, which is.)"""
    def program(make: Make) -> Any:
        y = make(X) * 1
        z = y * y
        graph.increment_version([y])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()

    agree(program, way)


@pytest.mark.parametrize("table", [P(), P("x"), P(None, "x")], ids=str)
@pytest.mark.parametrize(
    "name", ["embedding", "padding", "index", "index_select", "gather", "take"])
def test_second_derivative_of_a_read_on_ranks_without_indices(name: str, table: P) -> None:
    """torch's embedding has none where there are no indices."""
    reads: dict[str, Any] = {
        "embedding": lambda w, ids: F.embedding(ids, w),
        "padding": lambda w, ids: F.embedding(ids, w, padding_idx=0),
        "index": lambda w, ids: w[ids],
        "index_select": lambda w, ids: w.index_select(0, ids),
        "gather": lambda w, ids: w.gather(0, ids[:, None]),
        "take": lambda w, ids: w.take(ids),
    }

    def second(w: Any, ids: Any) -> Any:
        out = reads[name](w.requires_grad_(), ids)
        (first,) = torch.autograd.grad((out**3).sum(), w, create_graph=True)
        return torch.autograd.grad((first * first).sum(), w)[0]

    weight, ids = torch.randn(3, 2, dtype=torch.double), torch.tensor([2, 0, 2])
    due = second(weight.clone(), ids)

    def on_rank(mesh: Any) -> None:
        found = second(weft.distribute_tensor(weight, mesh, table),
                       weft.distribute_tensor(ids, mesh, P("x")))
        torch.testing.assert_close(found.full_tensor(), due)

    weft.testing.run(on_rank, mesh={"x": 5})


@pytest.mark.parametrize("name", [
    "cumprod", "cummax", "cummin", "logcumsumexp", "adaptive_max_pool1d", "adaptive_max_pool3d"])
def test_second_derivatives_where_a_shard_is_empty(name: str) -> None:
    """There torch's first gradients are shortcuts, which have none: of those that the ranks ask
    for, all must be asked for on the empty one."""
    fns: dict[str, Any] = {
        "cumprod": lambda x: x.cumprod(0), "logcumsumexp": lambda x: x.logcumsumexp(0),
        "cummax": lambda x: x.cummax(0)[0], "cummin": lambda x: x.cummin(0)[0],
        "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x.t(), 2),
        "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x.view(1, 5, 4, 1), (2, 4, 1)),
    }

    def gradients(x: Any) -> Any:
        out, found = fns[name](x.requires_grad_() * 1), []
        weights = torch.arange(1.0, out.numel() + 1).double().view(out.shape)
        for _ in range(2):
            (out,) = torch.autograd.grad(out, x, weights, create_graph=True)
            found.append(out)
            if not out.requires_grad:
                break
            weights = torch.ones_like(out.detach()) * 2
        return found

    start = torch.linspace(-1, 1, 20, dtype=torch.double).sin().view(5, 4).flip(0) ** 2 + 0.1
    due = gradients(start.clone())

    def on_rank(mesh: Any) -> None:
        found = gradients(weft.distribute_tensor(start, mesh, P(None, "x")))
        assert len(found) == len(due)
        for one, other in zip(found, due):
            torch.testing.assert_close(one.full_tensor(), other)

    weft.testing.run(on_rank, mesh={"x": 3})
