"""Hooks of tensors, modules, graphs and saved tensors, retained gradients: as on plain tensors."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import (
    disable_saved_tensors_hooks,
    get_gradient_edge,
    register_multi_grad_hook,
    saved_tensors_hooks,
)

import weft
from tests.sharded import Make, agree
from weft import P, UnsupportedOpError

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 16
W = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)
B = torch.linspace(-1, 2, 6, dtype=torch.float64)

WAYS = ("even", "partial", "empty", "both", "half partial")


def leaf(full: Tensor) -> Tensor:
    return full.clone().requires_grad_()


def copies(tensors: Any) -> list[Any]:
    return [None if one is None else one.clone() for one in tensors]


# Retained gradients.


def retained(make: Make) -> Any:
    x, w, b = make(X), make(W), make(B)
    h, c = x * 1, b * 2
    z = (h + c) @ w
    total = z.sum()
    kept = [h, c, z, total]
    for one in kept:
        one.retain_grad()
    (z.tanh().sum() + (h**2).mean() + (c * total).sum()).backward()
    return [[one.grad for one in kept], [one.retains_grad for one in kept], x.grad, w.grad, b.grad]


def retained_products(make: Make) -> Any:
    x = make(X - 1)
    rows, columns, total = x.prod(0), x.prod(1, keepdim=True), x.prod()
    seen: list[Any] = []
    for one in (rows, columns, total):
        one.retain_grad()
        one.register_hook(lambda grad: seen.append(grad) or grad * 2)
    (rows * columns * total).sum().backward()
    (back,) = torch.autograd.grad((x.prod(0) ** 2).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad((back * back.detach()).sum(), x)
    return [rows.grad, columns.grad, total.grad, x.grad, copies(seen), back, again]


def retained_over_several_backwards(make: Make) -> Any:
    x = make(X)
    y = x * 2
    y.retain_grad()
    y.retain_grad()
    loss = (y * y).sum()
    loss.backward(retain_graph=True)
    first = y.grad.clone()
    y.grad = None
    loss.backward(retain_graph=True)
    second = y.grad
    loss.backward()
    return [first, second, y.grad, x.grad]


def retained_view(make: Make) -> Any:
    x, w = make(X), make(W)
    part, _ = x.split([2, 3])
    turned = w.t()
    part.retain_grad()
    turned.retain_grad()
    (part @ turned.t()).tanh().sum().backward()
    # torch's is a contiguous copy, weft's lies as the tensor does
    return [part.grad, turned.grad.contiguous(), x.grad, w.grad]


def retained_leaf(make: Make) -> Any:
    x = make(X)
    x.retain_grad()
    (x * x).sum().backward()
    return [x.retains_grad, x.grad]


def retained_without_gradient(make: Make) -> Any:
    make(X, False).retain_grad()


# Hooks of tensors.


def hooks_in_order(make: Make) -> Any:
    x, seen = make(X), []
    none_yet = x._backward_hooks is None
    x.register_hook(lambda g: (seen.append(1), g * 2)[1])
    x.register_hook(lambda g: (seen.append(2), g + 1)[1])
    x.register_post_accumulate_grad_hook(lambda _: seen.append(3))
    (x * x).sum().backward()
    return [seen, x.grad, none_yet, len(x._backward_hooks)]


def hooks_of_results(make: Make) -> Any:
    """A replicated result used by what varies and by what does not."""
    x, b, seen = make(X), make(B), []
    c = b * 2
    c.register_hook(lambda g: (seen.append(g.clone()), g.clamp(-1, 0.5))[1])
    ((x + c).tanh().sum() + (c * c).sum()).backward()
    return [seen, b.grad, x.grad]


def hook_after_a_write(make: Make) -> Any:
    x, seen = make(X), []
    y = x * 1
    y[1:3].mul_(2)
    y.register_hook(lambda g: seen.append(g.clone()))
    (y * y).sum().backward()
    return [x.grad, seen]


def hook_of_another_shape(make: Make) -> Any:
    x = make(X)
    x.register_hook(lambda g: g.sum())
    (x * x).sum().backward()


def hook_of_another_dtype(make: Make) -> Any:
    x = make(X)
    x.register_hook(lambda g: g.float())
    (x * x).sum().backward()
    return x.grad


def hook_that_raises(make: Make) -> Any:
    w, b, x = make(W), make(B[:3]), make(X, False)

    def fail(_: Any) -> None:
        raise ArithmeticError

    y = x @ w + b
    handle = y.register_hook(fail)
    with contextlib.suppress(ArithmeticError):
        (y.tanh().sum() + (x @ w).exp().sum()).backward()
    handle.remove()
    w.grad = b.grad = None
    (x @ w + b).tanh().sum().backward()
    return [w.grad, b.grad]


def accumulation_hooks(make: Make) -> Any:
    x, seen = make(X), []
    handle = x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
    for _ in range(2):
        (x * x).sum().backward()
    handle.remove()
    (x * x).sum().backward()
    return [seen, x.grad]


def accumulation_hook_of_a_result(make: Make) -> Any:
    (make(X) * 2).register_post_accumulate_grad_hook(lambda _: None)


def accumulation_hook_with_a_value(make: Make) -> Any:
    x = make(X)
    x.register_post_accumulate_grad_hook(lambda t: t.grad)
    (x * x).sum().backward()


def optimizers_in_hooks(make: Make) -> Any:
    params, x = [make(W), make(B[:3])], make(X, False)
    of = {id(p): torch.optim.SGD([p], 0.1) for p in params}

    def step(p: Tensor) -> None:
        of[id(p)].step()
        of[id(p)].zero_grad()

    for p in params:
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        (x @ params[0] + params[1]).square().mean().backward()
    return params


def hooks_of_plain_parameters(make: Make) -> Any:
    w, x, seen = leaf(W), make(X), []
    w.register_hook(lambda g: (seen.append(g.clone()), g * 2)[1])
    w.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
    ((x @ w).tanh().sum() + (w * w).sum()).backward()
    return [seen, w.grad, x.grad]


def hooks_of_several(make: Make) -> Any:
    x, w, t, unused, seen = make(X), make(W), leaf(W), make(B), []
    y, v = x * 2, w * 3
    handles = [
        register_multi_grad_hook((x, w, t, y, v, unused), lambda g: seen.append(copies(g))),
        register_multi_grad_hook((x, w), lambda _: seen.append("any"), mode="any"),
    ]
    (y @ v + x @ t).tanh().sum().backward()
    for handle in handles:
        handle.remove()
    (y @ w).sum().backward()
    return [seen, x.grad, w.grad]


def hooks_of_nodes(make: Make) -> Any:
    x, seen = make(X), []
    y = x * x
    y.grad_fn.register_hook(lambda *_: seen.append("after"))
    y.grad_fn.register_prehook(lambda _: seen.append("before"))
    y.sum().backward()
    return [x.grad, seen, y.grad_fn.name() is not None, x.grad_fn is None]


def backward_in_a_hook(make: Make) -> Any:
    w, x, v, found = make(W), make(X), make(W), []

    def hook(_: Any) -> None:
        with torch.enable_grad():
            (make(X, False) @ v).tanh().sum().backward()
            (make(X, False) @ w).exp().sum().backward()
            found.append(torch.autograd.grad((make(X, False) @ w).tanh().sum(), w))

    y = x @ w
    y.register_hook(hook)
    y.tanh().sum().backward()
    return [w.grad, v.grad, x.grad, found]


# Hooks of modules.


def net(make: Make) -> Any:
    module = nn.Sequential(nn.Linear(6, 3).double(), nn.Tanh())
    module[0].weight = nn.Parameter(make(W.T.contiguous(), False))
    module[0].bias = nn.Parameter(make(B[:3], False))
    return module


def hooks_of_modules(make: Make) -> Any:
    module, x, seen = net(make), make(X), []
    first: Any = module[0]
    first.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    first.register_forward_pre_hook(lambda _, given, named: (given, named), with_kwargs=True)
    first.register_forward_hook(lambda _, given, out: out + 1)
    first.register_full_backward_pre_hook(lambda _, results: (results[0] * 2,))
    first.register_full_backward_hook(lambda _, given, results: (given[0] * 3,))
    module.register_forward_hook(
        lambda _, given, named, out: seen.append(out.clone()), with_kwargs=True, always_call=True
    )
    module.register_full_backward_hook(lambda _, i, o: seen.append(copies((*i, *o))))
    module(x).sum().backward()
    return [seen, x.grad, first.weight.grad, first.bias.grad]


def hooks_of_a_module_used_twice(make: Make) -> Any:
    module, x, seen = nn.Tanh(), make(X), []
    module.register_full_backward_hook(lambda _, i, o: seen.append(copies((*i, *o))))
    y = module(x) + module(x * 2)
    y.add_(1)
    y.sum().backward()
    return [seen, x.grad]


class OfNames(nn.Module):
    """A dict of results, an argument by name."""

    def forward(self, x: Tensor, *, k: Tensor) -> dict[str, Tensor]:
        return {"a": x * k, "b": x}


def hooks_of_a_module_with_a_dict(make: Make) -> Any:
    module, x, k, seen = OfNames(), make(X), make(X), []
    module.register_full_backward_hook(lambda _, i, o: seen.append(copies((*i, *o))))
    out = module(x, k=k)
    (out["a"] * out["b"]).sum().backward()
    return [seen, x.grad, k.grad]


# Hooks of saved tensors.


def saved_on_disk(make: Make) -> Any:
    def pack(saved: Tensor) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(saved, file)
        return file

    def unpack(file: io.BytesIO) -> Tensor:
        file.seek(0)
        return torch.load(file)

    with saved_tensors_hooks(pack, unpack):
        x, w = make(X), make(W)
        loss = ((x @ w).tanh() * (x @ w).softmax(-1)).sum()
    loss.backward()
    return [x.grad, w.grad]


def saved_nowhere(make: Make) -> Any:
    with disable_saved_tensors_hooks("none"), saved_tensors_hooks(lambda t: t, lambda t: t):
        make(X).exp()


PROGRAMS = [
    retained, retained_products, retained_over_several_backwards, retained_view, retained_leaf,
    retained_without_gradient, hooks_in_order, hooks_of_results, hook_after_a_write,
    hook_of_another_shape, hook_of_another_dtype, hook_that_raises, accumulation_hooks,
    accumulation_hook_of_a_result, accumulation_hook_with_a_value, optimizers_in_hooks,
    hooks_of_plain_parameters, hooks_of_several, hooks_of_nodes, backward_in_a_hook,
    hooks_of_modules, hooks_of_a_module_used_twice, hooks_of_a_module_with_a_dict,
    saved_on_disk, saved_nowhere,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_hooks(program: Any, way: str) -> None:
    agree(program, way)


def test_retained_gradients_have_the_dual_layout() -> None:
    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        total = x.sum(0)
        total.retain_grad()
        (total * 2).sum().backward()
        return [str(total.sharding), str(total.grad.sharding)]

    assert weft.testing.run(on_rank, mesh={"x": 2}) == [["[6] partial(sum@x)", "[6]"]] * 2


def test_global_module_hooks() -> None:
    """They belong to the process, so all ranks call them."""
    def program(make: Make) -> Any:
        module, x = nn.Tanh(), make(X)
        module(x * 2).sum().backward()
        return [x.grad]

    handles = [
        nn.modules.module.register_module_full_backward_hook(lambda _, i, o: (i[0] * 2,)),
        nn.modules.module.register_module_forward_hook(lambda _, i, out: out * 2),
    ]
    try:
        for way in WAYS:
            agree(program, way)
    finally:
        for handle in handles:
            handle.remove()


def refused(call: Any) -> str:
    def on_rank(mesh: Any) -> str:
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        with pytest.raises(UnsupportedOpError) as info:
            call(x)
        return str(info.value)

    first, second = weft.testing.run(on_rank, mesh={"x": 2})
    assert first == second
    return first


def test_hooks_of_the_old_kind_are_refused() -> None:
    module = nn.Sequential(nn.Tanh(), nn.Tanh())
    module.register_backward_hook(lambda *_: None)
    assert refused(module).splitlines() == [
        "module.register_backward_hook(...): 2 ShardTensors are among its arguments, or the "
        "parameters and buffers of a module.",
        "  Rule: it works on plain tensors alone, and knows neither layouts nor communication.",
        "  Offenders: [5@x, 6]",
        "  Fix: module.register_full_backward_hook(hook)",
    ]
    with pytest.warns(FutureWarning, match="non-full backward hook"):
        module(leaf(X))  # torch's own words for its own tensors


def test_gradient_edges_are_refused() -> None:
    assert refused(get_gradient_edge).splitlines() == [
        "get_gradient_edge(...): 1 ShardTensors are among its arguments, or the parameters and "
        "buffers of a module.",
        "  Rule: it works on plain tensors alone, and knows neither layouts nor communication.",
        "  Offenders: [5@x, 6]",
        "  Fix: torch.autograd.grad(y, x), with x itself",
    ]
    assert get_gradient_edge(leaf(X)).output_nr == 0
