"""Rules of users' own ops: Python functions, autograd.Functions, torch.library ops."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import weft
from tests.cases.own import rule
from tests.harness import check_op
from tests.sharded import WAYS, Make, agree
from weft import Layout, LayoutError, P, PlacementError, ShardTypeError, UnsupportedOpError

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 16
W = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)
B = torch.linspace(-1, 2, 3, dtype=torch.float64)


SEEN: list[Any] = []
"""The shapes that the local functions have seen."""


def scaled_product(x: Tensor, w: Tensor, k: float = 2.0) -> Tensor:
    SEEN.append((tuple(x.shape), tuple(w.shape)))
    return (x @ w) * k


class Product(torch.autograd.Function):
    """A product with a gradient of its own; numpy computes, so that no ShardTensor may come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, k: float) -> Tensor:
        assert type(x) is not weft.ShardTensor
        ctx.save_for_backward(x, w)
        ctx.k = k
        return torch.from_numpy(x.detach().numpy() @ w.detach().numpy()) * k

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.T * ctx.k, x.T @ grad * ctx.k, None


class NewStyle(torch.autograd.Function):
    """The same with setup_context, once differentiable."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, k: float = 2.0) -> Tensor:
        return x @ w * k

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.k = inputs[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.T * ctx.k, x.T @ grad * ctx.k, None


@torch.library.custom_op("weft_tests::product", mutates_args=())
def library_product(x: Tensor, w: Tensor, k: float = 2.0) -> Tensor:
    return torch.from_numpy(x.detach().numpy() @ w.detach().numpy()) * k


@library_product.register_fake
def _(x: Tensor, w: Tensor, k: float = 2.0) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, k = inputs
    ctx.save_for_backward(x, w)
    ctx.k = k


def _product_backward(ctx: Any, grad: Tensor) -> Any:
    x, w = ctx.saved_tensors
    return grad @ w.T * ctx.k, x.T @ grad * ctx.k, None


library_product.register_autograd(_product_backward, setup_context=_save)


@torch.library.custom_op("weft_tests::unfaked", mutates_args=())
def library_unfaked(x: Tensor, w: Tensor, k: float = 2.0) -> Tensor:
    return torch.from_numpy(x.detach().numpy() @ w.detach().numpy()) * k


library_unfaked.register_autograd(_product_backward, setup_context=_save)

FORMS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "function": (scaled_product, scaled_product),
    "Function": (Product, Product.apply),
    "setup_context": (NewStyle, NewStyle.apply),
    "custom_op": (library_product, library_product),
    "packet": (torch.ops.weft_tests.product, torch.ops.weft_tests.product),
    "overload": (torch.ops.weft_tests.product.default, torch.ops.weft_tests.product.default),
    "overload of a packet": (torch.ops.weft_tests.product, torch.ops.weft_tests.product.default),
    "packet of an overload": (
        torch.ops.weft_tests.product.default, torch.ops.weft_tests.product
    ),
    "without fake kernel": (library_unfaked, torch.ops.weft_tests.unfaked),
}


@pytest.mark.parametrize("way", ["even", "uneven", "partial", "empty", "both"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_what_the_plain_call_gives(form: str, way: str) -> None:
    op, call = FORMS[form]

    def program(make: Make) -> Any:
        x, w, t = make(X), make(W), W.clone().requires_grad_()
        outs = []
        for k in (2.0, 3.0):
            y = call(x * 1, w, k)
            z = call(x, t, k)
            (y.tanh().sum() + (z * y).sum()).backward()
            outs += [y, z, y.requires_grad, y.is_leaf]
        with torch.no_grad():
            outs.append(call(x, w, 1.0))
        outs.append(call(make(X, False), make(W, False), 1.0).requires_grad)
        return [*outs, x.grad, w.grad, t.grad]

    with rule(op, "m k, k n -> m n", linear=[0, 1]):
        agree(program, way)


@pytest.mark.parametrize("form", FORMS)
def test_no_gather(form: str) -> None:
    """Cut by any factor it runs where the operands lie; a replicated operand's gradient is reduced
    once."""
    op, call = FORMS[form]

    def on_rank(mesh: Any) -> list[Any]:
        said = []
        for left, right in (("x", None), (None, (None, "x")), ((None, "x"), "x")):
            x = weft.distribute_tensor(X, mesh, _spec(left), src_data_rank=None).requires_grad_()
            w = weft.distribute_tensor(W, mesh, _spec(right), src_data_rank=None).requires_grad_()
            with weft.explain() as log:
                y = call(x, w, 2.0)
                forward = len(log.events)
                y.backward(torch.ones(5, 3, dtype=torch.float64))
            torch.testing.assert_close(y.detach().full_tensor(), X @ W * 2)
            said.append([str(y.sharding), forward, [one.collective for one in log.events]])
        return said

    with rule(op, "m k, k n -> m n", linear=[0, 1]):
        outcomes = weft.testing.run(on_rank, mesh={"x": 2})
    assert outcomes == [[
        ["[5@x, 3]", 0, ["AllReduce"]],
        ["[5, 3@x]", 0, ["AllReduce"]],
        ["[5, 3] partial(sum@x)", 0, []],
    ]] * 2


def _spec(entries: Any) -> P:
    return P(*entries) if isinstance(entries, tuple) else P(entries)


def test_a_function_sees_local_tensors_and_only_once() -> None:
    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)
        SEEN.clear()
        for _ in range(2):
            scaled_product(x, W)
        return list(SEEN)

    with rule(scaled_product, "m k, k n -> m n"):
        assert weft.testing.run(on_rank, mesh={"x": 2}) == [
            [((3, 6), (6, 3))] * 2, [((2, 6), (6, 3))] * 2,
        ]
    assert scaled_product(X, W, k=1.0).equal(X @ W)


def test_strict_and_explain_name_the_op() -> None:
    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P(None, "x"), src_data_rank=None)
        w = weft.distribute_tensor(W, mesh, P(), src_data_rank=None)
        with weft.explain() as log:
            scaled_product(x, w)
        with weft.strict(), pytest.raises(weft.StrictError, match="scaled_product"):
            scaled_product(x, w)
        return [(event.op, event.reason) for event in log.events]

    with rule(scaled_product, "m k!, k! n -> m n"):
        assert weft.testing.run(on_rank, mesh={"x": 2}) == [
            [("scaled_product", "x shards m")]
        ] * 2


# What a rule can say.


def kinds(op: Any, pattern: Any, *operands: Tensor, **options: Any) -> None:
    with rule(op, pattern, **options):
        weft.testing.check_rule(op, *operands)


def test_results_of_other_factors() -> None:
    def moments(x: Tensor) -> Any:
        return torch.stack([x.sum(1), (x * x).sum(1), x.amax(1)], 1), {"max": x.amax(1)}

    kinds(moments, "b s! -> b 3, b", X)


def test_kinds_of_reduction() -> None:
    def largest(x: Tensor) -> Tensor:
        return x.amax(1) if x.shape[1] else x.new_full((x.shape[0],), -float("inf"))

    kinds(largest, "b s:max -> b", X)
    kinds(lambda x: x.sum(0), "a ... -> ...", torch.rand(4, 3, 2, dtype=torch.float64), linear=[0])


def test_compound_dims_and_moves() -> None:
    def heads(x: Tensor, h: int) -> Tensor:
        return x.unflatten(1, (h, -1)).transpose(1, 2).contiguous()

    with rule(heads, lambda x, h: "b (h d) -> b d h"), pytest.raises(LayoutError) as info:
        weft.testing.check_rule(heads, torch.rand(4, 6, dtype=torch.float64), 3)
    assert "LayoutError: rule 'b (h d) -> b d h': shapes [(4, 6)] do not fit" in str(info.value)
    kinds(
        lambda x, h: x.reshape(x.shape[0], h, x.shape[1] // h),
        lambda x, h: f"b ({h} d) -> b {h} d",
                torch.rand(4, 6, dtype=torch.float64), 3,  # type: ignore
        linear=[0], moves=True,
    )


def test_factors_that_must_not_be_empty() -> None:
    def least(x: Tensor) -> Tensor:
        return x.min(1).values  # raises for no columns

    with rule(least, "b s:min -> b"), pytest.raises(LayoutError, match="sharding s: IndexError"):
        weft.testing.check_rule(least)
    kinds(least, "b s:min -> b", nonempty=["s"])


def test_several_strings() -> None:
    def affine(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return x @ w if b is None else x @ w + b

    strings = ["... i, i o -> ... o", "... i!, i! o, o -> ... o"]
    with rule(affine, strings):
        weft.testing.check_rule(affine, X.view(5, 3, 2), torch.rand(2, 3, dtype=torch.float64))
        weft.testing.check_rule(affine, X, b=B, w=torch.rand(6, 3, dtype=torch.float64))
        weft.testing.check_rule(affine, X[0], torch.rand(6, 3, dtype=torch.float64), B)


def test_tensors_in_lists() -> None:
    def total(xs: list[Tensor], w: Tensor) -> list[Tensor]:
        return [x * w for x in xs]

    kinds(total, "a b, a b, a b -> a b, a b", [X, X + 1], X, linear=[(0, 1), 2])  # type: ignore


def test_integers() -> None:
    def counts(x: Tensor, k: int) -> Tensor:
        return torch.bincount(x.flatten(), minlength=k)

    kinds(counts, lambda x, k: f"n -> {k}", torch.tensor([0, 2, 1, 2, 2, 0, 1]), 3)  # type: ignore


def test_a_rule_that_does_not_speak() -> None:
    seen = []

    def double(x: Tensor, how: str) -> Tensor:
        seen.append(type(x).__name__)
        return x * 2

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)
        for how in ("local", "global"):
            torch.testing.assert_close(double(x, how).full_tensor(), X * 2)

    with rule(double, lambda x, how: "a b -> a b" if how == "local" else None):
        weft.testing.run(on_rank, mesh={"x": 2})
    assert sorted(seen) == ["ShardTensor"] * 2 + ["Tensor"] * 2


def test_arguments_by_name_stand_where_the_signature_has_them() -> None:
    def ratio(x: Tensor, y: Tensor) -> Tensor:
        return x / y

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(X[:5, :5], mesh, P("x"), src_data_rank=None)
        y = weft.distribute_tensor(X[:5, :5].T + 1, mesh, P(None, "x"), src_data_rank=None)
        for out in (ratio(x, y), ratio(x, y=y), ratio(y=y, x=x)):
            torch.testing.assert_close(out.full_tensor(), X[:5, :5] / (X[:5, :5].T + 1))
        for call in (library_product, torch.ops.weft_tests.product,
                     torch.ops.weft_tests.product.default):
            out = call(k=1.0, w=y, x=x)
            torch.testing.assert_close(out.full_tensor(), X[:5, :5] @ (X[:5, :5].T + 1))

    with rule(ratio, "a b, a b -> a b"), rule(library_product, "m k, k n -> m n"):
        weft.testing.run(on_rank, mesh={"x": 2})


def test_results_keep_their_memory_order() -> None:
    def turned(x: Tensor) -> Tensor:
        return (x * 2).t()

    with rule(turned, "a b -> b a"):
        check_op(turned, [X], {"x": 2}, [Layout(weft.Mesh({"x": 2}), (5, 6), P("x"))])
        for sizes in ((4, 1), (5, 0)):
            layout = Layout(weft.Mesh({"x": 2}), (5, 6), P("x"), sizes={0: sizes})
            with pytest.raises(AssertionError, match="strides"):
                # A dim of length 1 has no place in an order, and ranks must agree.
                check_op(turned, [X], {"x": 2}, [layout])


@pytest.mark.parametrize("way", WAYS)
def test_edges_of_empty_shards_stay(way: str) -> None:
    """A function may drop an edge where it finds nothing to do; other ranks would wait."""
    def picky(x: Tensor, w: Tensor) -> Tensor:
        return x * w if x.numel() else x.new_zeros(x.shape)

    def program(make: Make) -> Any:
        x, w = make(X), make(X[0])
        picky(x * 2, w).square().sum().backward()
        return [x.grad, w.grad]

    with rule(picky, "a b, b -> a b", linear=[0, 1]):
        agree(program, way)


@pytest.mark.parametrize("way", ["empty", "ragged", "both"])
def test_each_result_keeps_its_own_edges(way: str) -> None:
    def apart(x: Tensor, w: Tensor) -> Any:
        return x * 2, x + 0 * w.detach(), w * 1 + 0 * x.detach()

    def program(make: Make) -> Any:
        x, w = make(X), make(X[0])
        a, b = x * 1, w * 1
        one, other, third = apart(a, b)
        found = [torch.autograd.grad(one.sum(), [a, b], allow_unused=True, retain_graph=True),
                 torch.autograd.grad(other.sum(), [a, b], allow_unused=True, retain_graph=True)]
        third.square().sum().backward()
        return [*found, x.grad is None, w.grad]

    with rule(apart, "a b, b -> a b, a b, a b"):
        agree(program, way)


class AddOne(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.clone()


@torch.library.custom_op("weft_tests::add_into", mutates_args=("x",))
def add_into(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def test_functions_that_write() -> None:
    def program(x: Any, y: Any) -> list[Any]:
        z = x * 1
        w = z
        out = AddOne.apply(z, y)
        (z * z).sum().backward()
        with torch.no_grad():
            w = x.detach().clone()
            add_into(w, y)
        return [out is z, z, x.grad, y.grad, w]

    def on_rank(mesh: Any, spec: P) -> list[Any]:
        x, y = (weft.distribute_tensor(one, mesh, spec, src_data_rank=None).requires_grad_()
                for one in (X, X + 1))
        return [one.detach().full_tensor() if isinstance(one, Tensor) else one
                for one in program(x, y)]

    wanted = program(X.clone().requires_grad_(), (X + 1).requires_grad_())
    with rule(AddOne, "a b, a b -> a b", linear=[(0, 1)]), rule(add_into, "a b, a b -> a b"):
        for spec in (P("x"), P(None, "x"), P()):
            for found in weft.testing.run(lambda mesh, spec=spec: on_rank(mesh, spec), 2, {"x": 2}):
                assert found[0] is wanted[0] is True
                for one, due in zip(found[1:], wanted[1:]):
                    torch.testing.assert_close(one, due.detach())


def add_sum(x: Tensor, y: Tensor) -> Tensor:
    """Writes to x, and gives it."""
    return x.add_(y.sum(0))


def double_and_add(x: Tensor, y: Tensor) -> Tensor:
    """Writes to x, and gives something else."""
    x.mul_(2)
    return x + y


def nothing_back(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def writes_that_move(make: Make, grad: bool = True) -> Any:
    """Operands that come to the functions in other layouts, twice, and as what they had been."""
    x, y = make(X, grad), make(X + 1, grad)
    z = x * 1
    first = AddOne.apply(z, y * 1)
    second = double_and_add(z, y)
    nothing_back(z, z * 2)
    row = make(X[0], grad) * 1
    third = add_sum(row, y)
    into = x.detach().clone()
    add_into(into, y.detach())
    loss = (z * z).sum() + (second * third).tanh().sum()
    found = [first is z, third is row, z, second, row, into]
    if not loss.requires_grad:
        return found
    loss.backward()
    return [*found, x.grad, y.grad, z.is_leaf, z.requires_grad]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["grad", "no grad", "inference"])
@pytest.mark.parametrize("factors", ["a b", "a! b", "a b!"])
def test_writes_come_back_to_operands_that_moved(factors: str, mode: str, way: str) -> None:
    def program(make: Make) -> Any:
        if mode == "grad":
            return writes_that_move(make)
        with torch.inference_mode() if mode == "inference" else torch.no_grad():
            return writes_that_move(make, False)

    alike = f"{factors}, {factors} -> {factors}"
    with rule(AddOne, alike), rule(add_into, alike), rule(double_and_add, alike), \
            rule(nothing_back, alike), rule(add_sum, "b, a b -> b", linear=[(0, 1)]):
        agree(program, way)


def test_rules_of_functions_that_write_are_checked() -> None:
    wide, line = (X[:, :4], X[:, 1:5]), (X[0, :4], X[0, 1:5])
    for op, pattern, pair in (
        (AddOne, "a b, a b -> a b", wide), (double_and_add, "a, a -> a", line),
        (nothing_back, "a! b, a! b -> a! b", wide), (add_into, "a, a -> a", line),
    ):
        with rule(op, pattern):
            weft.testing.check_rule(op, *[one + 0 for one in pair])
    with rule(AddOne, "a b, a b -> a b", linear=[0]), pytest.raises(LayoutError, match="partial"):
        weft.testing.check_rule(AddOne, X + 0, X + 0)


@pytest.mark.parametrize("mode", ["grad", "no grad", "inference"])
@pytest.mark.parametrize("way", WAYS)
def test_writes_to_views_reach_their_base(way: str, mode: str) -> None:
    """Wherever the view had to move; and it is read again where the base was written to."""
    def program(make: Make) -> Any:
        x, y = make(X, mode == "grad"), make(X[:2] + 1, mode == "grad")
        with torch.inference_mode() if mode == "inference" else torch.set_grad_enabled(
            mode == "grad"
        ):
            z = x * 1
            rows, turned = z[1:3], z.t()
            AddOne.apply(rows, y * 2)
            nothing_back(turned, z.t() * 2)
            z.mul_(3)
            found = [double_and_add(rows * 1, y), rows, z, turned]
            if mode != "grad":
                return found
            torch.stack([one.sum() for one in found]).tanh().sum().backward()
        return [*found, x.grad, y.grad]

    alike = "a b, a b -> a b"
    with rule(AddOne, alike), rule(double_and_add, alike), rule(nothing_back, alike):
        agree(program, way)


def test_writes_to_views_that_a_function_made_of_moved_operands_are_refused() -> None:
    def turned(x: Tensor) -> Tensor:
        return x.t()

    def on_rank(mesh: Any) -> str:
        y = turned(weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None))
        with pytest.raises(UnsupportedOpError) as info:
            AddOne.apply(y, y.clone())
        return str(info.value)

    with rule(AddOne, "a b, a b -> a b"), rule(turned, "a! b -> b a!"):
        said = weft.testing.run(on_rank, mesh={"x": 2})[0].splitlines()
    assert said[0].startswith(
        "AddOne(...), which wrote to its tensor argument 0: the tensor [6@x, 5] came from a view")
    assert said[1:] == [
        "  Rule: a write through a view reaches its base only where they share memory.",
        "  Offenders: [6@x, 5]",
        "  Fix: write to the base, or clone() the view first",
    ]


# Registering, again, and no more.


def test_a_new_rule_makes_new_recipes() -> None:
    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(X, mesh, P(None, "x"), src_data_rank=None)
        w = weft.distribute_tensor(W, mesh, P("x"), src_data_rank=None)
        said = []
        for call in (scaled_product, library_product):
            for pattern in ("m k, k n -> m n", "m! k!, k! n! -> m! n!", None):
                mesh.comm((0,)).exchange(0)  # all ranks have come
                if pattern is None:
                    weft.unregister_rule(call)
                else:
                    weft.register_rule(call, pattern)
                for _ in range(2):
                    y = call(x, w)
                    torch.testing.assert_close(y.full_tensor(), X @ W * 2)
                said.append(str(y.sharding))
        return said

    due = ["[5, 3] partial(sum@x)", "[5, 3]", "[5, 3] partial(sum@x)",
           "[5, 3] partial(sum@x)", "[5, 3]", "[5, 3]"]
    with pytest.warns(weft.WeftWarning, match="no rule covers it") as told:
        assert weft.testing.run(on_rank, mesh={"x": 2}) == [due] * 2
    assert {one.filename for one in told} == {__file__}  # where the user called, not where we warn


def test_rules_of_torch_s_own_ops() -> None:
    """By the name of the ATen op every way of calling it is reached; an algorithm stands back."""
    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(X, mesh, P(None, "x"), src_data_rank=None)
        out = []
        for y in (torch.softmax(x, -1), x.softmax(-1), torch.nn.functional.softmax(x, dim=-1)):
            torch.testing.assert_close(y.full_tensor(), X.softmax(-1))
            out.append(str(y.sharding))
        return [*out, str(torch.tanh(x).sharding)]

    before = weft.testing.run(on_rank, mesh={"x": 2})
    with rule(torch.ops.aten.softmax.int, "... s! -> ... s!"), rule(torch.tanh, "a b! -> a b!"):
        during = weft.testing.run(on_rank, mesh={"x": 2})
    assert before == weft.testing.run(on_rank, mesh={"x": 2}) == [["[5, 6@x]"] * 4] * 2
    assert during == [["[5@x, 6]"] * 4] * 2


def test_a_decorator() -> None:
    @weft.register_rule("a b -> a b", linear=[0])
    def double(x: Tensor) -> Tensor:
        """Twice."""
        return x * 2

    assert double.__doc__ == "Twice." and double(X).equal(X * 2)
    weft.testing.check_rule(double)
    weft.unregister_rule(double)
    weft.unregister_rule(double)  # nothing to forget


# Errors.


def refused(kind: type[Exception], call: Callable[[], Any]) -> list[str]:
    with pytest.raises(kind) as info:
        call()
    return str(info.value).splitlines()


def pair(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@pytest.mark.parametrize(
    ("op", "pattern", "options", "said"),
    [
        (pair, "m k, k n m n", {}, "it has 0 arrows"),
        (pair, "m k, k n, n -> m n", {}, "it has 3 operands"),
        (pair, "m k, k n -> m q", {}, "no operand tells the size of 1 factors of the results"),
        (pair, "m k, k n -> m n", {"linear": [2]}, "it has 2 operands, numbered from 0"),
        (pair, "m k, k n -> m n", {"nonempty": ["q"]}, "no operand has 1 of the factors"),
        (pair, "m k:avg, k n -> m n", {}, "a mean over shards of other lengths"),
        (pair, "m 3x -> m", {}, "is no part of a factor string"),
        (Product, "m k, k n, n q, q -> m n", {}, "it has 4 operands"),
        (library_product, "m k -> m", {}, "it has 1 operands and 1 results"),
        (library_product, "m k, k n -> m n, m", {}, "it has 2 operands and 2 results"),
    ],
)
def test_rules_that_do_not_fit_the_signature(
    op: Any, pattern: str, options: Any, said: str
) -> None:
    lines = refused(PlacementError, lambda: weft.register_rule(op, pattern, **options))
    assert said in lines[0] and len(lines) == 4
    assert pair(X, W).equal(X @ W) and not hasattr(pair, "__signature__")


@pytest.mark.parametrize(
    "op", [len, torch.nn.Linear(2, 2), torch.Tensor.item, torch.nn.ReLU, 3, [pair]],
    ids=["builtin", "module", "method", "class", "number", "list"],
)
def test_ops_that_cannot_be_seen(op: Any) -> None:
    lines = refused(ShardTypeError, lambda: weft.register_rule(op, "a -> a"))
    assert lines[1].startswith("  Rule: a Python function, an autograd.Function, a torch.library")


def on_two(call: Callable[[Any], Any]) -> list[str]:
    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)
        return refused(LayoutError, lambda: call(x))

    return weft.testing.run(on_rank, mesh={"x": 2})[0]


def test_operands_that_do_not_fit() -> None:
    with rule(pair, ["m k, k n -> m n", "m, m -> "]):
        assert on_two(lambda x: pair(x, x.sum(0))) == [
            "the rules of pair: operands of shapes [(5, 6), (6,)] fit none of 2 strings.",
            "  Rule: one of the strings names every dim of every tensor operand and result.",
            "  Offenders: rule 'm k, k n -> m n': a tensor of shape (6,) stands where 2 dims are "
            "named., rule 'm, m -> ': a tensor of shape (5, 6) stands where 1 dims are named.",
            "  Fix: weft.register_rule(op, [..., another string])",
        ]


def test_results_that_do_not_fit() -> None:
    def halves(x: Tensor) -> Any:
        return x[:, :2], x[:, 2:]

    def rows(x: Tensor) -> Tensor:
        return x[:2]

    with rule(halves, "a b -> a b"), rule(rows, "a b -> a b"):
        assert on_two(halves) == [
            "test_results_that_do_not_fit.<locals>.halves(...): it returned 2 tensors, its rule "
            "has 1 results.",
            "  Rule: a rule names every tensor result.",
            "  Offenders: 2 tensors",
            '  Fix: weft.register_rule(test_results_that_do_not_fit.<locals>.halves, "... -> ..., '
            '...")',
        ]
        with pytest.raises(LayoutError) as info:  # on rank 1 the shape is right, by chance
            weft.testing.run(
                lambda mesh: rows(weft.distribute_tensor(X, mesh, P(0), src_data_rank=None)), 2
            )
        assert str(info.value).splitlines() == [
            "test_results_that_do_not_fit.<locals>.rows(...): on rank 0 result 0 has the local "
            "shape (2, 6); by its rule it is [5@0, 6], of local shape (3, 6).",
            "  Rule: on local tensors a function gives the local part of what it gives on the "
            "whole.",
            "  Offenders: operands [5@0, 6]",
            "  Fix: weft.testing.check_rule(test_results_that_do_not_fit.<locals>.rows) finds the "
            'factors that must be whole: "b s! -> b s!"',
        ]


def test_terms_are_not_rounded() -> None:
    def cast(x: Tensor) -> Tensor:
        return x.float()

    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(X, mesh, P(partial={"x": "sum"}), src_data_rank=None)
        return refused(LayoutError, lambda: cast(x))

    with rule(cast, "a b -> a b", linear=[0]):
        assert "partial sums became float32" in weft.testing.run(on_rank, mesh={"x": 2})[0][0]


def test_ranks_outside_the_mesh() -> None:
    def on_rank(mesh: Any) -> Any:
        w = torch.ones(6, 3, dtype=torch.float64, requires_grad=True)
        x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)
        y = scaled_product(x, w)
        return tuple(y.shape), y.dtype, y.requires_grad

    with rule(scaled_product, "m k, k n -> m n"):
        found = weft.testing.run(on_rank, 3, weft.Mesh({"x": 2}))
    assert found == [((5, 3), torch.float64, True)] * 3


def test_many_operands_of_all_kinds_on_two_axes() -> None:
    """The layouts of two operands, all with all, on a mesh of two axes."""
    mesh = weft.Mesh({"dp": 2, "tp": 2})
    places = [None, 0, 1, "sum"]

    def layout(shape: tuple[int, ...], where: tuple[Any, Any]) -> Layout:
        entries: list[list[str]] = [[], []]
        partial = {}
        for axis, place in zip(mesh.axis_names, where):
            if isinstance(place, int):
                entries[place].append(str(axis))
            elif place:
                partial[axis] = place
        return Layout(mesh, shape, P(*[tuple(e) or None for e in entries], partial=partial or None))

    ways = list(itertools.product(places, repeat=2))
    with rule(Product, "m k, k n -> m n", linear=[0, 1]):
        for at, (one, other) in enumerate(itertools.product(ways, ways)):
            if at % 5 == 0:
                check_op(
                    lambda x, w: Product.apply(x, w, 2.0), [X, W], {"dp": 2, "tp": 2},
                    [layout((5, 6), one), layout((6, 3), other)],
                )
