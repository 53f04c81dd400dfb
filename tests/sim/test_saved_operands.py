"""What autograd has saved of an operand is told of writes to it, also where the operand was
gathered or reduced for its op: torch refuses the backward, and so do the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.library import Library

import weft
from tests.sharded import Make, agree
from weft import P

X = torch.arange(1.0, 21.0, dtype=torch.float64).view(5, 4) / 8 - 1
W = torch.arange(20.0, dtype=torch.float64).view(5, 4) % 7 - 3
WAYS = ["even", "uneven", "replicated", "partial", "ragged", "both", "half partial"]

OPS: dict[str, Callable[[Any, Any], Any]] = {
    "mul": lambda x, w: x * w,
    "matmul": lambda x, w: x @ w.t(),
    "linear": lambda x, w: F.linear(x, w),
    "tanh": lambda x, w: x * w.tanh(),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
    "twice": lambda x, w: (x * w) * w,
    "add": lambda x, w: x + w,  # saves nothing: torch lets the write pass
    "copy": lambda x, w: x * w.clone(),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda w: w.add_(1),
    "row": lambda w: w[0].zero_(),
    "view": lambda w: w.view(-1).mul_(2),
    "setitem": lambda w: w.__setitem__((slice(None), 1), 3.0),
    "none": lambda w: None,
}

LIBRARY = Library("weft_saved_operands", "FRAGMENT")
LIBRARY.define("bump(Tensor(a!) x, Tensor y) -> ()")


@torch.library.impl(LIBRARY, "bump", "CompositeExplicitAutograd")
def _bump(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("op", OPS)
def test_written_between_forward_and_backward(op: str, write: str, way: str) -> None:
    def program(make: Make) -> Any:
        x, w = make(X), make(W, False)
        out = OPS[op](x, w)
        WRITES[write](w)
        (out * out.detach()).sum().backward()
        return [out, x.grad]

    agree(program, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", OPS)
def test_a_leaf_or_what_was_made_of_one(op: str, way: str) -> None:
    def program(make: Make) -> Any:
        x, leaf = make(X), make(W)
        made = leaf * 2
        first, second = OPS[op](x, leaf), OPS[op](x, made)
        with torch.no_grad():
            leaf.mul_(0.5)
        made.add_(1)
        (first.sum() + second.sum()).backward()
        return [x.grad, leaf.grad]

    agree(program, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_write_before_the_next_use(way: str) -> None:
    def program(make: Make) -> Any:
        x, w = make(X), make(W, False)
        first = (x * w).detach()
        w.add_(1)
        second = x * w
        second.sum().backward()
        return [first, second, x.grad]

    agree(program, way)


def test_redistribute_gives_a_value() -> None:
    def run(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P()).requires_grad_()
        w = weft.distribute_tensor(W, mesh, P(partial={"x": "sum"}))
        out = x * w.redistribute(placements=P())
        w.zero_()
        out.sum().backward()
        return x.grad.full_tensor()

    for got in weft.testing.run(run, mesh={"x": 2}):
        torch.testing.assert_close(got, W)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
def test_an_unknown_op_that_writes_to_one_of_two_views(way: str) -> None:
    """The two are gathered apart: what was not written is not written back over what was."""
    def program(make: Make) -> Any:
        x = make(X, False)
        torch.ops.weft_saved_operands.bump(x, x[:])
        return x

    agree(program, way)
