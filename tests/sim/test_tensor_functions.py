"""Users' autograd Functions, module hooks, checkpointing, clipping: as on plain tensors.

A saved-tensor hook sees local tensors, and those of a checkpoint are recomputed by all ranks in
the same order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import weft
from tests.cases.backward import ragged_checkpoint
from tests.sharded import Make, agree, in_ways
from weft import P

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 16
W = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)


class Product(torch.autograd.Function):
    """a * b * k."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, k: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.k = k
        return a * b * k

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return grad * b * ctx.k, grad * a * ctx.k, None


class Several(torch.autograd.Function):
    """Row maxima, their places (no gradient), and twice the tensor."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Any:
        places = a.argmax(1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.shape = a.shape
        return a.amax(1), places, a * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any, doubled: Tensor) -> Tensor:
        places, = ctx.saved_tensors
        out = torch.zeros(ctx.shape, dtype=grad.dtype)
        return out.scatter_(1, places[:, None], grad[:, None]) + doubled * 2


class Halves(torch.autograd.Function):
    """Both arguments; only the first gets a gradient, absent ones stay None."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return a * 1, b * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor | None) -> Any:
        assert other is None
        return grad * 7, None


class Square(torch.autograd.Function):
    """a**2, once differentiable."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        a, = ctx.saved_tensors
        return grad * 2 * a


class WithContext(torch.autograd.Function):
    """a * b in the newer style."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return grad * b, grad * a


class Same(torch.autograd.Function):
    """The argument itself, with five times the gradient, a number and a text."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Any:
        return a.view_as(a), 5, "text"

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Tensor:
        return grad * 5


class OfList(torch.autograd.Function):
    """a times a tensor that stands in a list."""

    @staticmethod
    def forward(ctx: Any, others: list[Tensor], a: Tensor) -> Tensor:
        return a * others[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


class Dirty(torch.autograd.Function):
    """Adds one in place."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        a.add_(1)
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Silent(torch.autograd.Function):
    """Halves its argument in place, and does not say so."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        a -= a / 2
        return a * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class Net(nn.Module):
    """Two linears with fixed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)
        self.double()
        with torch.no_grad():
            for k, p in enumerate(self.parameters()):
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape) * (k + 1) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.parameters()]


def function(make: Make) -> Any:
    x, y, t = make(X), make(X + 1), (X + 2).requires_grad_()
    z = Product.apply(x * 2, y, 2.0)
    (Product.apply(z, t, 1.0) * z).sum().backward()
    grads = [x.grad, y.grad, t.grad.clone()]
    t.grad = None
    return [z, *grads, z.requires_grad, z.grad_fn is not None, z.is_leaf]


def function_with_several_results(make: Make) -> Any:
    x = make(X)
    values, places, doubled = Several.apply(x)
    (values.sum() + (doubled * doubled).sum()).backward(retain_graph=True)
    first = x.grad.clone()
    values.sum().backward()
    return [values, places, doubled, first, x.grad, places.requires_grad]


def function_without_some_gradients(make: Make) -> Any:
    x, y = make(X), make(X)
    a, _ = Halves.apply(x, y)
    a.sum().backward()
    return [x.grad, y.grad]


def function_that_writes_to_a_leaf_without_a_word(make: Make) -> Any:
    """Its forward records no graph (sparsemax of pytorch_tabnet)."""
    x = make(X)
    out = Silent.apply(x)
    (out.sum() + x.square().sum()).backward()
    return [out, x, x.grad, x.is_leaf]


def function_once_differentiable(make: Make) -> Any:
    x = make(X)
    Square.apply(x).sum().backward()
    return x.grad


def function_twice_where_once_is_allowed(make: Make) -> Any:
    x = make(X)
    gradient, = torch.autograd.grad(Square.apply(x).sum(), x, create_graph=True)
    gradient.sum().backward()


def function_twice(make: Make) -> Any:
    x, y = make(X), make(X + 1)
    z = Product.apply(x * x, y, 2.0)
    gradient, = torch.autograd.grad(z.sum(), x, create_graph=True)
    (gradient * gradient).sum().backward()
    return [x.grad, y.grad]


def function_with_setup_context(make: Make) -> Any:
    x = make(X)
    WithContext.apply(x, x * 2).sum().backward()
    return x.grad


def function_that_returns_its_argument(make: Make) -> Any:
    x = make(X)
    y, number, text = Same.apply(x)
    (y * y).sum().backward()
    return [x.grad, y, number, text]


def function_of_a_list(make: Make) -> Any:
    x, c = make(X), make(X, False)
    y = OfList.apply([c], x)
    y.sum().backward()
    z = OfList.apply([c], (X * 1).requires_grad_())
    return [y, x.grad, z, z.requires_grad]


def function_that_writes(make: Make) -> Any:
    x = make(X)
    y = x * 2
    z = Dirty.apply(y)
    (y * y * x).sum().backward()
    with torch.no_grad():
        w = make(X, False)
        same = Dirty.apply(w) is w
    return [z is y, y, x.grad, y.is_leaf, y.requires_grad, w, same]


def function_that_writes_to_a_view(make: Make) -> Any:
    x = make(X)
    y = x * 2
    Dirty.apply(y[1:])
    (y * y).sum().backward()
    return [y, x.grad]


def function_that_writes_to_a_leaf(make: Make) -> Any:
    Dirty.apply(make(X))


def function_without_grad(make: Make) -> Any:
    x = make(X)
    with torch.no_grad():
        y = Product.apply(x, x, 1.0)
    z = Product.apply(make(X, False), make(X, False), 1.0)
    return [y, y.requires_grad, z.requires_grad]


def forward_hooks(make: Make) -> Any:
    module, x, seen = Net(), make(X), []
    module.a.register_forward_hook(lambda _, i, o: seen.append((i[0].clone(), o.clone())))
    module.b.register_forward_pre_hook(lambda _, i: (i[0] * 2,))

    def one_more(_: Any, given: Any, out: Any) -> Tensor:
        return out + 1

    module.act.register_forward_hook(one_more)
    module(x).sum().backward()
    return [seen, x.grad, module.gradients()]


def backward_hooks(make: Make) -> Any:
    module, x, seen = Net(), make(X), []

    def look(_: Any, gradients: Any, results: Any) -> None:
        seen.append([one.clone() for one in (*gradients, *results)])

    module.a.register_full_backward_hook(look)
    module.act.register_full_backward_hook(lambda _, gradients, results: (gradients[0] * 2,))
    module.b.register_full_backward_pre_hook(lambda _, results: (results[0] * 3,))
    (module(x) ** 2).sum().backward()
    return [seen, x.grad, module.gradients()]


def backward_hook_without_input_gradient(make: Make) -> Any:
    module, seen = Net(), []
    module.register_full_backward_hook(
        lambda _, i, o: seen.append((i[0] is None, o[0].clone()))
    )
    (module(make(X, False)) ** 2).sum().backward()
    return [seen, module.gradients()]


class TwoInTwoOut(nn.Module):
    """The product and the sum."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x * y, x + y


def backward_hook_of_several(make: Make) -> Any:
    module, seen = TwoInTwoOut(), []
    module.register_full_backward_hook(
        lambda _, i, o: seen.append([one.clone() for one in (*i, *o)])
    )
    x, y = make(X), X[0].clone().requires_grad_()
    a, b = module(x, y)
    (a * b).sum().backward()
    return [seen, x.grad, y.grad]


def _checkpointed(make: Make, reentrant: bool) -> Any:
    module, x, w = Net(), make(X), make(W)
    module.a.weight = nn.Parameter(make(module.a.weight.detach(), False))

    def part(a: Tensor, b: Tensor, k: int) -> Any:
        return module(a).sum() + (a @ b) * k, a * 2

    y, z = checkpoint(part, x * 2, w, 3, use_reentrant=reentrant)
    (y.sum() * z).sum().backward()
    return [y, z, x.grad, w.grad, module.gradients()]


def checkpoint_reentrant(make: Make) -> Any:
    return _checkpointed(make, True)


def checkpoint_not_reentrant(make: Make) -> Any:
    return _checkpointed(make, False)


def _nested(make: Make, reentrant: bool) -> Any:
    module, x = Net(), make(X)

    def outer(a: Tensor) -> Tensor:
        return checkpoint(module, a, use_reentrant=reentrant) * 2

    y = checkpoint(outer, x * 2, use_reentrant=reentrant)
    (y * y).sum().backward()
    return [y, x.grad, module.gradients()]


def checkpoint_nested_reentrant(make: Make) -> Any:
    return _nested(make, True)


def checkpoint_nested(make: Make) -> Any:
    return _nested(make, False)


def checkpoint_of_a_sequence(make: Make) -> Any:
    one, other = Net(), Net()
    stack = nn.Sequential(one.a, one.act, other.b, other.act)
    x = make(X)
    y = checkpoint_sequential(stack, 2, x * 1, use_reentrant=False)
    y.sum().backward()
    return [y, x.grad, [p.grad for p in stack.parameters()]]


def _twice(make: Make, reentrant: bool) -> Any:
    """Several results, one used by nothing; a second use; a result that is an argument."""
    x, w, b = make(X), make(W), make(W[0])

    def part(a: Tensor) -> Any:
        return (a @ w + b).tanh(), (a * a).exp(), a

    y, z, same = checkpoint(part, x * 1, use_reentrant=reentrant)
    u, v, _ = checkpoint(part, x * 2, use_reentrant=reentrant)
    (y.sum() + (u * y).sum() + v.mean() + same.sum()).backward()
    return [x.grad, w.grad, b.grad, z.requires_grad]


def checkpoint_twice_reentrant(make: Make) -> Any:
    return _twice(make, True)


def checkpoint_twice(make: Make) -> Any:
    return _twice(make, False)


def checkpoint_of_containers(make: Make) -> Any:
    x, w = make(X), make(W)

    def part(given: dict[str, Any], *, k: Tensor) -> dict[str, Any]:
        return {"y": [(given["x"] @ k).tanh(), 3], "n": None}

    out = checkpoint(part, {"x": x}, k=w, use_reentrant=False)
    out["y"][0].sum().backward()
    return [out["y"], out["n"], x.grad, w.grad]


def checkpoint_and_grad(make: Make) -> Any:
    x, w = make(X), make(W)
    loss = checkpoint(lambda a: (a @ w).tanh(), x, use_reentrant=False).square().sum()
    first = torch.autograd.grad(loss, [x, w], create_graph=True)
    (first[0].square().sum() + first[1].sum()).backward()
    return [first, x.grad, w.grad]


def checkpoint_reentrant_and_grad(make: Make) -> Any:
    x = make(X)
    torch.autograd.grad(checkpoint(torch.tanh, x, use_reentrant=True).sum(), x)


def checkpoint_kept(make: Make) -> Any:
    x, w = make(X), make(W)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        loss = checkpoint(lambda a: (a @ w).tanh(), x, use_reentrant=False).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with torch.no_grad():
        free = checkpoint(lambda a: (a @ w).tanh(), x, use_reentrant=False)
    return [x.grad, w.grad, free, free.requires_grad]


def checkpoint_that_raises(make: Make) -> Any:
    def part(_: Tensor) -> Any:
        raise ArithmeticError

    checkpoint(part, make(X), use_reentrant=False)


def checkpoint_with_side_effects(make: Make) -> Any:
    x, w, out = make(X), make(W), []

    def part(a: Tensor) -> Tensor:
        out.append(a @ w)
        return (a @ w).tanh()

    y = checkpoint(part, x, use_reentrant=False)
    (y.sum() + out[0].square().sum()).backward()
    return [w.grad, x.grad]


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    saved = op == torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_selective(make: Make) -> Any:
    x, w = make(X), make(W)
    y = checkpoint(
        lambda a: (a @ w).tanh().exp(), x, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(_policy),
    )
    y.square().sum().backward()
    return [y, x.grad, w.grad]


def checkpoint_of_parameters_alone(make: Make) -> Any:
    module = Net()
    checkpoint(module, make(X, False), use_reentrant=False).sum().backward()
    return module.gradients()


def saved_tensor_hooks(make: Make) -> Any:
    kinds = set()

    def pack(saved: Tensor) -> Tensor:
        kinds.add(type(saved).__name__)
        return saved.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        x = make(X)
        y = (x * x.exp()).sum()
    y.backward()
    return [x.grad, kinds == {"Tensor"}]


def saved_on_cpu(make: Make) -> Any:
    x = make(X)
    with torch.autograd.graph.save_on_cpu():
        y = (x.exp() @ W).tanh().sum()
    y.backward()
    return x.grad


def clipped_norm(make: Make) -> Any:
    seen = []
    for kind, foreach in ((2.0, None), (1.0, False), (float("inf"), True), (3.0, False)):
        module = Net()
        module.a.weight = nn.Parameter(make(module.a.weight.detach(), False))
        module.b.bias = nn.Parameter(make(module.b.bias.detach(), False))
        (module(make(X, False)) ** 2).sum().backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5, kind, foreach=foreach)
        seen += [norm, module.gradients()]
    return seen


def clipped_values(make: Make) -> Any:
    seen = []
    for foreach in (None, False, True):
        p, q, r = nn.Parameter(make(X, False)), nn.Parameter(make(W, False)), nn.Parameter(X[:3])
        ((r @ (p.T @ p @ q)) ** 2).sum().backward()
        assert p.grad is not None and q.grad is not None
        seen.append(nn.utils.get_total_norm([p.grad, q.grad]))
        seen.append(nn.utils.clip_grad_norm_([p, q, r], 0.5, foreach=foreach))
        nn.utils.clip_grad_value_([p, q, r], 0.01, foreach=foreach)
        seen += [p.grad, q.grad, r.grad]
    return seen


def clipped_to_an_error(make: Make) -> Any:
    p = nn.Parameter(make(X, False))
    p.grad = make(X / 0, False)
    nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)


PROGRAMS = [
    function, function_with_several_results, function_without_some_gradients,
    function_once_differentiable, function_twice_where_once_is_allowed, function_twice,
    function_with_setup_context, function_that_returns_its_argument, function_of_a_list,
    function_that_writes, function_that_writes_to_a_leaf,
    function_that_writes_to_a_leaf_without_a_word, function_without_grad,
    forward_hooks, backward_hooks, backward_hook_without_input_gradient,
    backward_hook_of_several, checkpoint_reentrant, checkpoint_not_reentrant,
    checkpoint_nested_reentrant, checkpoint_nested, checkpoint_of_a_sequence,
    checkpoint_of_parameters_alone, checkpoint_twice_reentrant, checkpoint_twice,
    checkpoint_of_containers, checkpoint_and_grad, checkpoint_reentrant_and_grad,
    checkpoint_kept, checkpoint_that_raises, checkpoint_with_side_effects,
    checkpoint_selective, saved_tensor_hooks, saved_on_cpu, clipped_norm,
    clipped_values, clipped_to_an_error,
]


@pytest.mark.filterwarnings("ignore:.*no rule covers it.*:weft.WeftWarning")
@pytest.mark.parametrize("program, way", in_ways(PROGRAMS))
def test_functions(program: Any, way: str) -> None:
    agree(program, way)


@pytest.mark.parametrize("spec", [P(None, "x"), P()], ids=str)
def test_a_function_writes_through_views_that_share_memory(spec: P) -> None:
    def program(x: Any) -> Any:
        y = x * 2
        Dirty.apply(y[1:])
        (y * y).sum().backward()
        return y.detach(), x.grad

    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, spec).requires_grad_()
        return [one.full_tensor() for one in program(x)]

    wanted = program(X.clone().requires_grad_())
    for found in weft.testing.run(on_rank, mesh={"x": 2}):
        for one, due in zip(found, wanted):
            torch.testing.assert_close(one, due)


def test_a_function_that_writes_to_a_view_that_moved_writes_to_its_base() -> None:
    def program(x: Any) -> list[Any]:
        y = x * 2
        view = y.view(-1, 2, 5)
        out = Dirty.apply(view)
        (y.sum() + (out * out).sum()).backward()
        return [y.detach(), view.detach(), out.detach(), x.grad]

    due = program(X.clone().requires_grad_())

    def on_rank(mesh: Any) -> list[Any]:
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        return [one.full_tensor() for one in program(x)]

    for found in weft.testing.run(on_rank, mesh={"x": 2}):
        assert all(map(torch.equal, found, due))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_moves_the_same_on_all_ranks(reentrant: bool) -> None:
    """The recomputation issues collectives of its own. A reentrant forward runs without gradient,
    so that its plans may be others."""
    def on_rank(mesh: Any) -> tuple[list[str], list[str]]:
        x = weft.distribute_tensor(X, mesh, P(None, "x")).requires_grad_()
        module = Net()

        def run(part: Any) -> list[str]:
            with weft.explain() as log:
                out = part(x * 1)
                (out * out).sum().backward()
            return [event.transition for event in log.events if event.op != "full_tensor"]

        plain = run(module)
        again = run(lambda a: checkpoint(module, a, use_reentrant=reentrant))
        return plain, again

    results = weft.testing.run(on_rank, mesh={"x": 2})
    plain, again = results[0]
    assert results == [(plain, again)] * 2
    assert len(again) > len(plain)
    assert reentrant or set(again) == set(plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_ranks_that_save_less_recompute_at_the_same_time(reentrant: bool) -> None:
    due = ragged_checkpoint(None, reentrant)[0]
    outcomes = weft.testing.run(lambda mesh: ragged_checkpoint(mesh, reentrant), mesh={"x": 2})
    for found, moved in outcomes:
        torch.testing.assert_close(found, due)
        assert moved == outcomes[0][1] and len(moved) > 4
