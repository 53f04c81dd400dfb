"""autograd.Functions with rules: all that their contexts can say, hooks, checkpoints, second order.

The same programs run without a rule, on full tensors.
"""

from __future__ import annotations

import warnings
import weakref
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import weft
from tests.cases.own import Product
from tests.sharded import Make, agree, in_ways

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 16
W = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)
B = torch.linspace(-1, 2, 6, dtype=torch.float64)


class Rows(torch.autograd.Function):
    """Row sums, where they are positive (no gradient), and the tensor scaled by b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, b: Tensor) -> Any:
        sums = x.sum(1)
        positive = sums > 0
        ctx.mark_non_differentiable(positive)
        ctx.save_for_backward(x, b)
        return sums, positive, x * b

    @staticmethod
    def backward(ctx: Any, sums: Tensor, positive: Tensor, scaled: Tensor) -> Any:
        x, b = ctx.saved_tensors
        assert positive is None or not positive.any()
        return sums[:, None] + scaled * b, (scaled * x).sum(0)


class Absent(torch.autograd.Function):
    """Twice and thrice; gradients of results that nothing uses stay None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, one: Tensor | None, other: Tensor | None) -> Any:
        return None if one is None else one * 2, None if other is None else other * 3


class Once(torch.autograd.Function):
    """x * b, once differentiable, of new style."""

    @staticmethod
    def forward(x: Tensor, b: Tensor) -> Tensor:
        return x * b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, b = ctx.saved_tensors
        return grad * b, (grad * x).sum(0)


class Exp(torch.autograd.Function):
    """Saves its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y, = ctx.saved_tensors
        return grad * y


class Straight(torch.autograd.Function):
    """Rounds; the gradient passes straight through, and a factor gets none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, b: Tensor) -> Tensor:
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class Both(torch.autograd.Function):
    """Writes to two operands and gives their product as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        x.mul_(2)
        y.add_(1)
        ctx.mark_dirty(x, y)
        ctx.save_for_backward(x, y)
        return x, y, x * y

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor, both: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return (one + both * y) * 2, other + both * x


class Failing(torch.autograd.Function):
    """Its backward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError


class Rounded(torch.autograd.Function):
    """In float32, and back in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 2).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.double() * 2


RULES: list[tuple[Any, str, dict[str, Any]]] = [
    (Product, "m k, k n -> m n", {"linear": [0, 1]}),
    (Rows, "m k!, k! -> m, m, m k!", {}),
    (Absent, "m k, m k -> m k, m k", {"linear": [(0, 1)]}),
    (Once, "m k, k -> m k", {"linear": [0, 1]}),
    (Exp, "... -> ...", {}),
    (Straight, "m k, k -> m k", {}),
    (Both, "m k, m k -> m k, m k, m k", {}),
    (Failing, "... -> ...", {}),
    (Rounded, "m k -> m k", {}),
]


def asked_for(make: Make) -> Any:
    x, w, c = make(X), W.clone().requires_grad_(), make(X, False)
    Product.apply(c, w).square().sum().backward()
    first = w.grad
    w.grad = None
    Product.apply(x, W).square().sum().backward()
    return [first, x.grad, Product.apply(c, W).requires_grad]


def several_results(make: Make) -> Any:
    x, b = make(X), make(B)
    sums, positive, scaled = Rows.apply(x * 1, b)
    sums.retain_grad()
    (sums.exp().sum() + (scaled * scaled).sum()).backward(retain_graph=True)
    first = [x.grad.clone(), b.grad.clone(), sums.grad]
    torch.where(positive, sums, 0.0).sum().backward()
    return [sums, positive, scaled, *first, x.grad, positive.requires_grad]


def absent_gradients(make: Make) -> Any:
    x, y = make(X), make(X + 1)
    one, other = Absent.apply(x, y)
    one.sum().backward(retain_graph=True)
    first = [x.grad.clone(), y.grad is None]
    (one * other).sum().backward()
    return [*first, x.grad, y.grad]


def grad_of_unused(make: Make) -> Any:
    x, y = make(X), make(X + 1)
    one, _ = Absent.apply(x, y)
    found = torch.autograd.grad(one.sum(), [x, y], allow_unused=True, retain_graph=True)
    return [found, torch.autograd.grad(one.sum(), [x, y], materialize_grads=True)]


def once(make: Make) -> Any:
    x, b = make(X), make(B)
    Once.apply(x, b).tanh().sum().backward()
    return [x.grad, b.grad]


def twice_where_once_is_allowed(make: Make) -> Any:
    x = make(X)
    first, = torch.autograd.grad(Once.apply(x, B).sum(), x, create_graph=True)
    first.sum().backward()


def second_order(make: Make) -> Any:
    x, w, t = make(X), make(W), W.clone().requires_grad_()
    loss = (Product.apply(x, w).tanh() * Product.apply(x, t)).sum()
    first = torch.autograd.grad(loss, [x, w, t], create_graph=True)
    torch.stack([one.square().sum() for one in first]).sum().backward()
    grads = [x.grad, w.grad, t.grad]
    third = torch.autograd.grad(Exp.apply(Exp.apply(x)).sum(), x, create_graph=True)
    return [first, grads, torch.autograd.grad(third[0].sum(), x)]


def result_saved_and_written_to(make: Make) -> Any:
    y = Exp.apply(make(X))
    y.mul_(2)
    y.sum().backward()


def straight_through(make: Make) -> Any:
    x, b = make(X), make(B)
    y = Straight.apply(x * 1, 3.0, b * 1)
    (y * y).sum().backward()
    return [y, x.grad, b.grad is None]


def several_writes(make: Make) -> Any:
    x, y = make(X), make(X + 1)
    a, b = x * 1, y * 1
    p, q, r = Both.apply(a, b)
    (p * q + r.tanh()).sum().backward()
    return [p is a, q is b, a, b, r, x.grad, y.grad, a.is_leaf, a.requires_grad]


def writes_without_gradient(make: Make) -> Any:
    x, y = make(X, False), make(X, False)
    p, q, r = Both.apply(x, y)
    return [p is x, q is y, x, y, r, r.requires_grad]


def a_backward_that_fails(make: Make) -> Any:
    x = make(X)
    with pytest.raises(ZeroDivisionError):
        Failing.apply(x * x).sum().backward()
    (x * x).sum().backward()
    return x.grad


def another_dtype(make: Make) -> Any:
    x = make(X)
    y = Rounded.apply(x * 1)
    y.retain_grad()
    (y * y).sum().backward()
    return [y, y.grad, x.grad]


def hooks(make: Make) -> Any:
    x, w, seen = make(X), make(W), []
    y = Product.apply(x, w)
    y.register_hook(lambda g: (seen.append(g.clone()), g * 2)[1])
    w.register_hook(lambda g: g + 1)
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    y.tanh().sum().backward()
    return [seen, x.grad, w.grad]


class Layer(nn.Module):
    """A Function with a weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight)  # type: ignore[return-value]


def module_hooks(make: Make) -> Any:
    layer, x, seen = Layer(make(W, False)), make(X), []
    layer.register_full_backward_hook(lambda _, i, o: seen.append([i[0].clone(), o[0].clone()]))
    layer.register_full_backward_pre_hook(lambda _, o: (o[0] * 2,))
    layer.register_forward_hook(lambda _, i, o: o + 1)  # type: ignore
    layer(x).tanh().sum().backward()
    return [seen, x.grad, layer.weight.grad]


def checkpoints(make: Make) -> Any:
    found = []
    for reentrant in (True, False):
        x, b, layer = make(X), make(B), Layer(make(W, False))

        def part(x: Tensor, b: Tensor, layer: Layer = layer) -> Any:
            sums, _, scaled = Rows.apply(Exp.apply(x), b)
            return layer(scaled).tanh(), sums

        y, sums = checkpoint(part, x * 1, b * 1, use_reentrant=reentrant)
        (y.sum() + sums.square().sum()).backward()
        found += [y, sums, x.grad, b.grad, layer.weight.grad]
    return found


def saved_elsewhere(make: Make) -> Any:
    x, w = make(X), make(W)
    with torch.autograd.graph.save_on_cpu():
        loss = Product.apply(Exp.apply(x), w).tanh().sum()
    loss.backward()
    return [x.grad, w.grad]


def saved_and_written_to(make: Make) -> Any:
    x, w = make(X), make(W)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        y = x * 1
        z = Product.apply(y, w)
        y.add_(1)
        (z * z).sum().backward()
    return [x.grad, w.grad, y]


def anomalies(make: Make) -> Any:
    x, w = make(X), make(W)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=False):
            Product.apply(x, w).square().sum().backward()
    return [x.grad, w.grad]


def shared_plain_weight(make: Make) -> Any:
    """Used by several, varying and not, over two backwards."""
    x, w = make(X), W.clone().requires_grad_()
    for k in (1, 2):
        loss = Product.apply(x, w).tanh().sum() * k + (x @ w).exp().mean()
        (loss + Exp.apply(w).sum()).backward()
    return [w.grad, x.grad]


PROGRAMS = [
    asked_for, several_results, absent_gradients, grad_of_unused, once,
    twice_where_once_is_allowed, second_order, straight_through, several_writes,
    writes_without_gradient, a_backward_that_fails, another_dtype, hooks, module_hooks,
    checkpoints, saved_elsewhere, saved_and_written_to, anomalies,
    shared_plain_weight, result_saved_and_written_to,
]


@pytest.mark.parametrize("program, way", in_ways(PROGRAMS))
def test_functions(program: Any, way: str) -> None:
    with ExitStack() as registered:
        for op, pattern, options in RULES:
            weft.register_rule(op, pattern, **options)
            registered.callback(weft.unregister_rule, op)
        agree(program, way)


@pytest.mark.parametrize("program, way", in_ways(PROGRAMS, ["empty", "half partial"]))
def test_functions_on_full_tensors(program: Any, way: str) -> None:
    for op, *_ in RULES:
        weft.op_by_op(op, False)
    try:
        agree(program, way)
    finally:
        for op, *_ in RULES:
            weft.op_by_op(op, None)


@pytest.mark.parametrize("program, way", in_ways(PROGRAMS))
def test_functions_without_rules_op_by_op(program: Any, way: str) -> None:
    agree(program, way)


@pytest.mark.parametrize("case", RULES, ids=lambda case: case[0].__name__)
def test_the_rules_are_right(case: Any) -> None:
    op, pattern, options = case
    if op is Failing:
        return
    example = {Straight: (X, 3.0, B), Rounded: (X,)}.get(op, ())
    weft.register_rule(op, pattern, **options)
    try:
        weft.testing.check_rule(op, *example)
    finally:
        weft.unregister_rule(op)


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.from_numpy(x.numpy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def test_a_large_operand_of_a_function_without_a_rule_is_told() -> None:
    def program(mesh: Any) -> Any:
        return _Same.apply(weft.ones(8, 4, mesh=mesh, placements=weft.P("x"))).sharding

    before = weft.warn_if_whole(129)
    try:
        weft.testing.run(program, mesh={"x": 2})
        weft.warn_if_whole(128)
        with pytest.warns(weft.WeftWarning, match=r"(?s)_Same.*128 bytes.*register_rule") as told:
            weft.testing.run(program, mesh={"x": 2})
        assert len(told) == 1
    finally:
        weft.warn_if_whole(before)


def test_a_function_op_by_op_stays_sharded() -> None:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x.round()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad

    def program(mesh: Any) -> Any:
        x = weft.ones(8, 4, mesh=mesh, placements=weft.P("x"), requires_grad=True)
        freed = x * 2
        kept = weakref.ref(freed)
        with weft.strict():
            out = Round.apply(freed)
            del freed
            out.sum().backward()
        return str(out.sharding), kept() is None, x.grad.full_tensor().unique().tolist()

    assert weft.testing.run(program, mesh={"x": 2}) == [("[8@x, 4]", True, [2.0])] * 2


@pytest.mark.parametrize("given", [Rows.apply, torch.exp, nn.ReLU, 3])
def test_only_a_function_class_runs_op_by_op(given: Any) -> None:
    with pytest.raises(weft.ShardTypeError, match=r"(?s)op_by_op.*weft.op_by_op\(TheFunction\)"):
        weft.op_by_op(given)


def test_too_few_gradients_are_torchs_error() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return x + y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad

    def program(mesh: Any) -> Any:
        x = weft.ones(8, 4, mesh=mesh, placements=weft.P("x"), requires_grad=True)
        with pytest.raises(RuntimeError, match="incorrect number of gradients"):
            Sum.apply(x, x).sum().backward()

    weft.testing.run(program, mesh={"x": 2})
