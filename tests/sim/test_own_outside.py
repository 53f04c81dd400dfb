"""Users' ops on a rank outside the mesh: it knows of results what the ranks inside know."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.cases import own
from tests.cases.own import Product
from weft import Mesh, P, ShardTensor

X = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
W = torch.linspace(-1, 2, 18, dtype=torch.float64).view(6, 3)


def rule(op: Any, pattern: str | None, **options: Any) -> AbstractContextManager[Any]:
    """With a rule, or without."""
    return own.rule(op, pattern, **options) if pattern is not None else nullcontext()


class OfNumpy(Product):
    """The same, which needs data."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.from_numpy(x.detach().numpy() @ w.detach().numpy())


def function(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def of_first(x: Tensor, w: Tensor) -> Tensor:
    """No gradient for the second operand; a result in another dtype and order of memory."""
    return (x @ torch.from_numpy(w.detach().numpy())).t().float().contiguous().t()


def several(x: Tensor, w: Tensor) -> Any:
    return {"y": x @ w, "where": [(x @ w) > 0, 3], "x": x}


class AddOne(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@torch.library.custom_op("weft_tests::outside_add_into", mutates_args=("x",))
def add_into(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def facts(x: Any) -> Any:
    """All that a rank knows of a tensor without data."""
    if isinstance(x, (list, tuple)):
        return [facts(one) for one in x]
    if isinstance(x, dict):
        return [(name, facts(one)) for name, one in x.items()]
    if not isinstance(x, ShardTensor):
        return type(x)
    return (str(x.sharding), tuple(x.shape), x.dtype, tuple(x.stride()), x.requires_grad)


CALLS = {
    "Function": (Product, Product.apply, ["m k, k n -> m n", "m k!, k! n! -> m n!", None]),
    "numpy": (OfNumpy, OfNumpy.apply, ["m k, k n -> m n", None]),
    "function": (function, function, ["m k!, k! n -> m n"]),
    "other memory": (of_first, of_first, ["m k!, k! n -> m n"]),
    "several": (several, several, ["m k!, k! n -> m n, m n, m k!"]),
}


@pytest.mark.parametrize(
    ("name", "pattern"),
    [(name, pattern) for name, (_, _, patterns) in CALLS.items() for pattern in patterns],
)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(partial={"x": "sum"}), P()], ids=str)
def test_facts(name: str, pattern: str | None, spec: P) -> None:
    op, call, _ = CALLS[name]

    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, spec, src_data_rank=None).requires_grad_()
        w = weft.distribute_tensor(W, mesh, P(), src_data_rank=None).requires_grad_()
        seen = [facts(call(x, w)) for _ in range(2)]
        with torch.no_grad():
            seen.append(facts(call(x, w)))
        return [*seen, facts(call(x, W))]

    with rule(op, pattern):
        inside, other, outside = weft.testing.run(on_rank, 3, Mesh({"x": 2}))
    assert outside == inside == other


MESHES = {
    "apart": (Mesh({"x": 2}, (0, 1)), Mesh({"y": 2}, (2, 3))),
    "overlapping": (Mesh({"x": 3}, (2, 0, 1)), Mesh({"y": 2}, (3, 1))),
}


@pytest.mark.parametrize("meshes", MESHES)
@pytest.mark.parametrize(
    ("name", "pattern", "twice"),
    [("Function", "m k, k n -> m n", True), ("Function", None, True),
     ("function", "m k!, k! n -> m n", True), ("numpy", "m k, k n -> m n", False),
     ("numpy", None, False)],
)
def test_gradients_come_back_from_another_mesh(
    name: str, pattern: str | None, twice: bool, meshes: str
) -> None:
    """What comes before the op in the graph is on another mesh: every rank has to take part."""
    op, call, _ = CALLS[name]

    def program(x: Tensor, w: Tensor, there: Any, back: Any) -> list[Tensor]:
        loss = back(call(there(x * x), there(w))).square().sum()
        first = torch.autograd.grad(loss, [x, w], create_graph=twice)
        if twice:
            torch.stack([one.square().sum() for one in first]).sum().backward()
        return [*first, x.grad, w.grad] if twice else list(first)  # type: ignore[list-item]

    def on_rank(_: Any) -> Any:
        one, other = map(weft.init_mesh, MESHES[meshes])
        x, w = (weft.distribute_tensor(full, one, spec, src_data_rank=None).requires_grad_()
                for full, spec in ((X, P("x")), (W, P())))
        found = program(x, w, lambda a: a.redistribute(other, P("y")),
                        lambda a: a.redistribute(one, P("x")))
        return None if one.here is None else [one.full_tensor().detach() for one in found]

    leaves = [one.clone().requires_grad_() for one in (X, W)]
    wanted = program(*leaves, lambda a: a, lambda a: a)  # type: ignore[call-arg]
    with rule(op, pattern, linear=[0, 1] if name == "Function" else []):
        for found in weft.testing.run(on_rank, 4, {"w": 4}):
            for mine, due in zip(found or wanted, wanted):
                torch.testing.assert_close(mine, due)


@pytest.mark.parametrize("pattern", ["a b -> a b", None])
def test_writes(pattern: str | None) -> None:
    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)
        w = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None).requires_grad_()
        y = w * 1
        same = AddOne.apply(x), AddOne.apply(y)
        into = x.clone()
        if pattern is not None:
            add_into(into, w * 2)
        return same[0] is x, same[1] is y, facts([x, y, into]), into.grad_fn is None

    with rule(AddOne, pattern), rule(add_into, pattern and "a b, a b -> a b"):
        inside, other, outside = weft.testing.run(on_rank, 3, Mesh({"x": 2}))
    assert outside == inside == other
    assert outside[:2] == (True, True)


class Rounded(torch.autograd.Function):
    """Of torch's operations: it runs op by op, outside of the mesh, too."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return (x * w).round()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


def test_a_function_of_torchs_operations() -> None:
    def on_rank(mesh: Any) -> Any:
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        x = weft.ones(4, 3, dtype=torch.float64, mesh=mesh, placements=P("x"), requires_grad=True)
        out: Any = Rounded.apply(x, w)
        out.sum().backward()
        return str(out.sharding), str(x.grad.sharding), None if w.grad is None else w.grad.tolist()

    inside, other, outside = weft.testing.run(on_rank, 3, Mesh({"x": 2}))
    assert inside == other == (*outside[:2], [4.0] * 3) and outside[2] is None
