"""`check_rule` lets right rules pass and finds every kind of wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.cases.own import rule
from tests.effort import drawn
from weft import LayoutError, ShardTypeError
from weft.testing import check_rule

X = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5


class GradientByRows(torch.autograd.Function):
    """Its gradient depends on how many rows this rank has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.rows / 5


class MissingGradient(torch.autograd.Function):
    """No gradient for an empty shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.empty = x.numel() == 0
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None if ctx.empty else grad


def other_dtype(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 5 else x.float() * 2


def counts_calls(calls: list[int]) -> Callable[[Tensor], Tensor]:
    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return x * len(calls)

    return counted


RIGHT: list[tuple[Any, Any, dict[str, Any], tuple[Any, ...]]] = [
    (lambda x: x.exp(), "a b -> a b", {}, ()),
    (lambda x, y: x * y, "a b, a b -> a b", {"linear": [0, 1]}, ()),
    (lambda x, y: x + y, "a b, a b -> a b", {"linear": [(0, 1)]}, ()),
    (lambda x, y: x + y, "... a, a -> ... a", {"linear": [(0, 1)]}, ()),
    (lambda x: x.softmax(1), "a b! -> a b!", {}, ()),
    (lambda x: x.flip(1), "a b! -> a b!", {"linear": [0], "moves": True}, ()),
    (lambda x, y: torch.einsum("bik,bkj->bij", x, y), "b i k, b k j -> b i j",
     {"linear": [0, 1]}, (torch.rand(3, 2, 4).double(), torch.rand(3, 4, 2).double())),
    (lambda x: x.sum(), "a b -> ", {"linear": [0]}, ()),
    (lambda x: (x > 1, x.argmax(1)), "a b! -> a b!, a", {}, ()),
    (lambda x, mask: x.masked_fill(mask, 0), "a b, a b -> a b", {"linear": [0]}, (X, X > 1)),
    (lambda x: x.prod(0), "a:product b -> b", {}, ()),
    (lambda x: x.bitwise_or(1), "a -> a", {}, (torch.arange(6),)),
    (lambda x: x.to(torch.complex128) * 1j, "a -> a", {"linear": [0]}, (X[0],)),
    (lambda x: (x * 2).to(torch.float32), "a b -> a b", {}, (X.float(),)),
]


@pytest.mark.parametrize(
    ("op", "pattern", "options", "example"), drawn(RIGHT), ids=[case[1] for case in drawn(RIGHT)]
)
def test_right_rules_pass(op: Any, pattern: Any, options: Any, example: Any) -> None:
    with rule(op, pattern, **options):
        check_rule(op, *example)


WRONG: list[tuple[str, Any, Any, dict[str, Any], tuple[Any, ...], list[str], str]] = [
    ("not linear", lambda x: x.exp(), "a b -> a b", {"linear": [0]}, (),
     ["passing partial values: result 0 differs"], "leave operands out of linear=[[0]]"),
    ("linear together, not apart", lambda x, y: x + y, "a b, a b -> a b", {"linear": [0, 1]}, (),
     ["passing partial values: result 0 differs"], "leave operands out of linear=[[0], [1]]"),
    ("not whole", lambda x: x.softmax(1), "a b -> a b", {}, (),
     ["sharding b: result 0 differs"], "write b! (whole)"),
    ("no sum", lambda x, w: (x @ w).tanh(), "m k, k n -> m n", {}, (),
     ["sharding k: result 0 differs"], "write k! (whole)"),
    ("a missing reduction", lambda x: x.amax(1), "a b -> a", {"nonempty": ["b"]}, (),
     ["sharding b: result 0 differs"], "the kind of reduction, as in s:max"),
    ("a wrong dim", lambda x: x.t() + 0, "a b -> a b", {}, (X[:4],),
     ["sharding a: LayoutError: ", "sharding b: LayoutError: "], "write a!, b! (whole)"),
    ("a wrong order", lambda x: x.transpose(1, 2).flatten(1), "a h d -> a (h d)",
     {"linear": [0]}, (torch.rand(5, 2, 2).double(),), ["sharding h: "], "write h! (whole)"),
    ("linear but for a constant", lambda x, y: x * y + 1, "a b, a b -> a b", {"linear": [0]}, (),
     ["passing partial values: result 0 differs"], "leave operands out of linear=[[0]]"),
    ("linear where it is positive", lambda x: x.abs(), "a b -> a b", {"linear": [0]}, (),
     ["passing partial values: result 0 differs"], "leave operands out of linear=[[0]]"),
    ("a mean", lambda x: x.mean(0), "a b -> b", {}, (),
     ["sharding a: result 0 differs"], "write a! (whole)"),
    ("another kind", lambda x: x.amax(0), "a:min b -> b", {"nonempty": ["a"]}, (),
     ["sharding a: result 0 differs"], "the kind of reduction"),
    ("a gradient", GradientByRows, "a b -> a b", {}, (),
     ["sharding a: the gradient of operand 0 differs"], "write a! (whole)"),
    ("a missing gradient", MissingGradient, "a b -> a b", {}, (),
     ["sharding a: CommunicationError: Offenders: rank 0 waits", "sharding b"],
     "write a!, b! (whole)"),
    ("not only moved", lambda x: -x, "a b -> a b", {"linear": [0], "moves": True}, (),
     ["passing partial values: result 0 differs"], "linear=[[0]]"),
    ("a dtype", other_dtype, "a b -> a b", {}, (),
     ["sharding a: CommunicationError: Offenders: rank 0 waits"], "write a! (whole)"),
    ("a shape", lambda x: x.repeat(2, 1)[:5], "a b -> a b", {}, (X,),
     ["sharding a: LayoutError"], "write a! (whole)"),
    ("a number of results", lambda x: (x, x), "a b -> a b", {}, (), [], ""),
    ("a state", counts_calls([]), "a b -> a b", {}, (), ["sharding a"], "any"),
    ("an integer", lambda x: x.cumsum(0), "a -> a", {}, (torch.arange(5),),
     ["sharding a: result 0 differs in"], "write a! (whole)"),
]


@pytest.mark.parametrize(
    ("op", "pattern", "options", "example", "offenders", "fix"),
    [case[1:] for case in WRONG], ids=[case[0] for case in WRONG],
)
def test_wrong_rules_are_found(
    op: Any, pattern: Any, options: Any, example: Any, offenders: list[str], fix: str
) -> None:
    with rule(op, pattern, **options), pytest.raises(LayoutError) as info:
        check_rule(op, *example)
    lines = str(info.value).splitlines()
    if not offenders:  # the plain call alone says so
        assert "results are given" in lines[0]
        return
    assert lines[0].startswith("check_rule(") and f"by the rule {pattern!r}" in lines[0]
    found = lines[2].removeprefix("  Offenders: ")
    assert all(offender in found for offender in offenders), found
    if fix != "any":
        assert found.count("sharding ") + found.count("passing ") == len(offenders), found
        assert fix in lines[3]


@torch.library.custom_op("weft_tests::without_gradient", mutates_args=())
def without_gradient(x: Tensor) -> Tensor:
    return x.sum(1)


@pytest.mark.parametrize("pattern", ["a b -> a", "a b:max -> a"])
def test_ops_without_gradient_are_checked_forward(pattern: str) -> None:
    with rule(without_gradient, pattern):
        if pattern == "a b -> a":
            check_rule(without_gradient)
        else:
            with pytest.raises(LayoutError, match="sharding b: result 0 differs"):
                check_rule(without_gradient)


def test_the_message() -> None:
    def norms(x: Tensor) -> Tensor:
        return x.norm(dim=1)

    with rule(norms, "a b -> a"), pytest.raises(LayoutError) as info:
        check_rule(norms, torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
    assert str(info.value).splitlines() == [
        "check_rule(test_the_message.<locals>.norms): by the rule 'a b -> a' the op gives another "
        "result than the plain call in 1 of its ways.",
        "  Rule: where a rule lets a mesh axis shard a factor or pass partial values, local "
        "results are the parts of the whole one.",
        "  Offenders: sharding b: result 0 differs by up to 4 on rank 0 ([2, 2@x] for x=2)",
        "  Fix: write b! (whole) in the string, or the kind of reduction, as in s:max",
    ]


def test_a_rule_that_fails_its_check_is_not_kept() -> None:
    def square(x: Tensor) -> Tensor:
        return x * x

    weft.register_rule(square, "a b -> a b", check=True)
    with pytest.raises(LayoutError, match="check_rule"):
        weft.register_rule(square, "a b -> a b", linear=[0], check=(X,))
    check_rule(square)  # the one before
    weft.unregister_rule(square)
    with pytest.raises(LayoutError, match="check_rule"):
        weft.register_rule(square, "a b -> a b", linear=[0], check=True)
    with pytest.raises(ShardTypeError, match="has no rule"):
        check_rule(square)


def test_examples_are_asked_for() -> None:
    with rule(lambda x, k: x * k, lambda x, k: "a -> a") as op:
        with pytest.raises(ShardTypeError, match="is a function of the arguments"):
            check_rule(op)
        check_rule(op, X[0], 3)
        check_rule(op, X[0], k=3)
    with rule(lambda x, k: x * k, lambda x, k: None) as op, pytest.raises(
        ShardTypeError, match="does not cover"
    ):
        check_rule(op, X[0], 3)


def test_a_check_within_a_simulated_rank() -> None:
    def on_rank(mesh: Any) -> str:
        with rule(lambda x: x.softmax(1), "a b -> a b") as op:
            try:
                check_rule(op)
            except LayoutError as error:
                return str(error).splitlines()[3]
        return "passed"

    assert weft.testing.run(on_rank, 2) == [
        "  Fix: write b! (whole) in the string, or the kind of reduction, as in s:max"
    ] * 2
