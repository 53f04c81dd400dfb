"""Hooks registered between forward and backward see whole gradients, once: as on plain tensors.

Replicated leaves that a varying op uses have partial gradients (`weft.tensor.leaf_gradients`).
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

import weft
from tests.sharded import Make, agree
from weft import P

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 16
W = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)


def varying(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x @ w + b).tanh().sum()


def mixed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """w and b by what varies, and by what does not."""
    return varying(x, w, b) + (w * w * w).sum() + b.exp().sum()


def apart(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """There are terms, but not in the graph of this loss."""
    return varying(x, w, b).detach() * (w.square().sum() + b.exp().sum())


def copies(grads: Any) -> list[Any]:
    return [None if one is None else one.clone() for one in grads]


def doubled(seen: list[Any], w: Tensor, b: Tensor, x: Tensor) -> None:
    for leaf in (w, b):  # leaves come in no particular order
        seen.append([])
        leaf.register_hook(lambda g, seen=seen[-1]: (seen.append(g.clone()), g * 2)[1])


def one_after_the_other(seen: list[Any], w: Tensor, b: Tensor, x: Tensor) -> None:
    w.register_hook(lambda g: (seen.append(1), g.clamp(-1, 0.5))[1])
    w.register_hook(lambda g: seen.append(g.clone()))
    w.register_hook(lambda g: (seen.append(2), g * g)[1])


def after_accumulation(seen: list[Any], w: Tensor, b: Tensor, x: Tensor) -> None:
    for leaf in (w, b):
        seen.append([])
        leaf.register_post_accumulate_grad_hook(
            lambda t, seen=seen[-1]: seen.append(t.grad.clone())
        )


def of_both_kinds(seen: list[Any], w: Tensor, b: Tensor, x: Tensor) -> None:
    w.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
    w.register_hook(lambda g: (seen.append(g.clone()), g * 2)[1])


def of_several(seen: list[Any], w: Tensor, b: Tensor, x: Tensor) -> None:
    register_multi_grad_hook((w, x, b), lambda grads: seen.append(copies(grads)))


def of_any(seen: list[Any], w: Tensor, b: Tensor, x: Tensor) -> None:
    register_multi_grad_hook((w, x), lambda g: seen.append("any"), mode="any")


def removed(seen: list[Any], w: Tensor, b: Tensor, x: Tensor) -> None:
    handles = [
        w.register_hook(lambda g: g * 2), b.register_post_accumulate_grad_hook(seen.append),
        register_multi_grad_hook((w, x), seen.append),
    ]
    for handle in handles:
        handle.remove()


HOOKS = [doubled, one_after_the_other, after_accumulation, of_both_kinds, of_several, of_any,
         removed]


def backwards(loss: Tensor, leaves: list[Tensor]) -> Any:
    loss.backward(retain_graph=True)
    first = copies(one.grad for one in leaves)
    loss.backward()
    return [first, copies(one.grad for one in leaves)]


def into_some(loss: Tensor, leaves: list[Tensor]) -> Any:
    x, w, b = leaves
    loss.backward(inputs=[w, x] if x.requires_grad else [w], retain_graph=True)
    loss.backward(inputs=[b])
    return copies(one.grad for one in leaves)


def found(loss: Tensor, leaves: list[Tensor]) -> Any:
    _, w, b = leaves
    some = torch.autograd.grad(loss, [w, b], retain_graph=True)
    return [some, torch.autograd.grad(loss, leaves, allow_unused=True), w.grad is None]


def twice(loss: Tensor, leaves: list[Tensor]) -> Any:
    _, w, b = leaves
    first = torch.autograd.grad(loss, [w, b], create_graph=True)
    sum(one.square().sum() for one in first).backward()
    return [first, copies(one.grad for one in leaves)]


def with_a_graph(loss: Tensor, leaves: list[Tensor]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss.backward(create_graph=True)
    first = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    sum(one.square().sum() for one in first if one is not None).backward()
    return [copies(first), copies(one.grad for one in leaves)]


ASKED = [backwards, into_some, found, twice, with_a_graph]


USES = [
    (mixed, "empty"), (varying, "both"), (apart, "ragged"), (mixed, "half partial"),
    (varying, "replicated"),
]


@pytest.mark.parametrize(
    ("hook", "ask", "use", "way"),
    [
        pytest.param(hook, ask, use, way, id=f"{hook.__name__} {ask.__name__} {way}")
        for hook in HOOKS for ask in ASKED for use, way in USES
        if (way == "empty" or ask in (backwards, found))
        # torch counts no leaves in torch.autograd.grad, and raises
        and not (hook is of_several and ask in (found, twice))
    ],
)
def test_late_hooks(hook: Any, ask: Any, use: Any, way: str) -> None:
    def program(make: Make) -> Any:
        x, w, b, seen = make(X), make(W), make(W[0]), []
        loss = use(x, w, b)
        hook(seen, w, b, x)
        return [ask(loss, [x, w, b]), seen]

    agree(program, way)


def refined(make: Make) -> Any:
    """The next forward goes by nodes; the graph before it keeps its terms."""
    x, w, b, seen = make(X, False), make(W), make(W[0]), []
    before = mixed(x, w, b)
    w.register_hook(lambda g: (seen.append(g.clone()), g * 2)[1])
    after = mixed(x * 2, w, b)
    (before + after).backward()
    return [w.grad, b.grad, seen]


def backward_in_a_late_hook(make: Make) -> Any:
    x, w, b, seen = make(X, False), make(W), make(W[0]), []

    def hook(grad: Tensor) -> None:
        seen.append(grad.clone())
        if len(seen) == 1:
            with torch.enable_grad():
                varying(x, w, b).backward()
                mixed(x, w, b).backward()

    loss = mixed(x, w, b)
    w.register_hook(hook)
    loss.backward()
    return [w.grad, b.grad, seen]


def late_hook_that_fails(make: Make) -> Any:
    x, w, b = make(X, False), make(W), make(W[0])
    loss = mixed(x, w, b)

    def fail(_: Any) -> None:
        raise ArithmeticError

    handle = w.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    handle.remove()
    w.grad = b.grad = None
    loss.backward()
    return [w.grad, b.grad]


def optimizers_in_late_hooks(make: Make) -> Any:
    x, params = make(X, False), [make(W), make(W[0])]
    loss = mixed(x, *params)
    for p in params:
        optimizer = torch.optim.SGD([p], 0.1)
        p.register_post_accumulate_grad_hook(
            lambda _, own=optimizer: (own.step(), own.zero_grad(), None)[2]
        )
    loss.backward()
    mixed(x, *params).backward()
    return [params, [p.grad is None for p in params]]


def many_hooks(make: Make) -> Any:
    seen: list[Any] = []
    for hook in HOOKS:
        for ask in ASKED if hook is not of_several else (backwards, into_some, with_a_graph):
            x, w, b = make(X), make(W), make(W[0])
            loss = mixed(x, w, b)
            seen.append([])
            hook(seen[-1], w, b, x)
            seen.append(ask(loss, [x, w, b]))
    return seen


PROGRAMS = [
    refined, backward_in_a_late_hook, late_hook_that_fails, optimizers_in_late_hooks, many_hooks,
]


@pytest.mark.parametrize("way", ("empty", "both"))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_programs(program: Any, way: str) -> None:
    agree(program, way)


def test_a_put_off_hook_costs_no_collective_of_its_own() -> None:
    def on_rank(mesh: Any) -> list[int]:
        counts = []
        for late in (False, True):
            x = weft.distribute_tensor(X, mesh, P("x"))
            w, b = (
                weft.distribute_tensor(one, mesh, P()).requires_grad_() for one in (W, W[0])
            )
            loss = mixed(x, w, b)
            if late:
                w.register_hook(lambda g: g * 2)
            with weft.explain() as log:
                loss.backward()
            counts.append(len({(e.op, e.nbytes) for e in log.events}))
        return counts

    for plain, late in weft.testing.run(on_rank, mesh={"x": 2}):
        assert plain == late
