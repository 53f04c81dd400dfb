"""torch's associative_scan along a sharded dim: values and gradients, to the second, are those of
one process, by one exchange each way whose bytes do not depend on the length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan
from torch.utils._pytree import tree_leaves, tree_map

import weft
from tests.harness import ranks
from weft import Layout, P, ShardTensor, UnsupportedOpError

Tree = Any


def affine(left: Tree, right: Tree) -> Tree:
    """Of factors and states by name, as state-space models combine them."""
    return {"a": left["a"] * right["a"], "b": right["a"] * left["b"] + right["b"]}


def moving(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Matrices and vectors: no elementwise function of a slice."""
    return right[0] @ left[0], (right[0] @ left[1][..., None])[..., 0] + right[1]


def normed(left: Tensor, right: Tensor) -> Tensor:
    """Associative: the second result has the sum of both, whatever the norm of rows reads."""
    return left + right + 0 * (left - left.mean(-1, keepdim=True))


def randoms(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


CALLS: dict[str, tuple[Callable[..., Any], int, Callable[[], Tree]]] = {
    "sum": (torch.add, 0, lambda: randoms(7, 4)),
    "product": (torch.mul, -1, lambda: randoms(2, 4, 7)),
    "affine": (affine, 1, lambda: {"a": randoms(2, 7, 4), "b": randoms(2, 7, 4)}),
    "matrices": (moving, 0, lambda: (randoms(7, 4, 4), randoms(7, 4))),
    "means": (normed, 0, lambda: randoms(7, 4)),
    "two dtypes": (lambda one, two: (one[0] + two[0], torch.maximum(one[1], two[1])), 0,
                   lambda: (randoms(7, 4), randoms(7, 4).float())),
}
CUTS = {"even": None, "ragged": (2, 0, 4, 1), "first is empty": (0, 3, 0, 4)}


def derivatives(call: Callable[[Tree], Tree], given: Tree) -> list[Tensor]:
    """The results, their gradients, and the gradients of a sum of squares of these."""
    leaves = tree_leaves(given)
    out = tree_leaves(call(given))
    total: Any = sum([one.double().pow(2).sum() for one in out])
    first = torch.autograd.grad(total, leaves, create_graph=True)
    again: Any = sum([one.double().pow(2).sum() for one in first])
    return [*out, *first, *torch.autograd.grad(again, leaves)]


@pytest.mark.parametrize(("cuts", "reverse", "others"), [
    ("even", False, "y"), ("ragged", True, None), ("ragged", False, "y"),
    ("first is empty", True, None), ("first is empty", True, "y")])
@pytest.mark.parametrize("name", CALLS)
def test_as_in_one_process(name: str, cuts: str, others: str | None, reverse: bool) -> None:
    """Four ranks share the scanned dim; two more may share the last of the others."""
    torch.manual_seed(0)
    function, dim, make = CALLS[name]
    full = make()

    def call(given: Tree) -> Tree:
        return associative_scan(function, given, dim, reverse=reverse, combine_mode="generic")

    due = derivatives(call, tree_map(lambda one: one.clone().requires_grad_(), full))

    @ranks(**({"x": 4} if others is None else {"y": 2, "x": 4}))
    def run(mesh: Any) -> None:
        def laid(one: Tensor) -> ShardTensor:
            at = dim % one.ndim
            spec: list[Any] = [None] * one.ndim
            if others is not None:
                spec[-1 if at < one.ndim - 1 else 0] = others
            spec[at] = "x"
            sizes = CUTS[cuts]
            layout = Layout(mesh, one.shape, P(*spec), sizes={} if sizes is None else {at: sizes})
            return weft.distribute_tensor(one, mesh, layout).requires_grad_()

        given = tree_map(laid, full)
        out = tree_leaves(call(given))
        for one, other, whole in zip(out, tree_leaves(given), due):
            assert one.sharding == other.sharding and one.stride() == whole.stride()
        for one, other in zip(derivatives(call, given), due):
            torch.testing.assert_close(one.full_tensor(), other)

    run()


@pytest.mark.parametrize("length", [16, 64])
def test_one_exchange_each_way(length: int) -> None:
    @ranks(x=4)
    def run(mesh: Any) -> None:
        given = {name: weft.rand(2, length, 3, device_mesh=mesh, placements=P(None, "x"),
                                 dtype=torch.float64).requires_grad_() for name in ("a", "b")}
        with weft.explain() as log:
            out: Any = associative_scan(affine, given, 1, combine_mode="generic")
            out["b"].sum().backward()
        nbytes = 3 * 2 * (2 * 3 * 8)
        sent = [event.nbytes for event in log.events if event.collective != "AllReduce"]
        assert sent == [nbytes] * 2

    run()


@ranks(x=2)
def test_whole_lines_and_plain_operands(mesh: Any) -> None:
    full = torch.randn(6, 4)
    rows = weft.distribute_tensor(full, mesh, P(None, "x"))
    out: Any = associative_scan(torch.add, rows, 0, combine_mode="generic")
    assert out.sharding == rows.sharding
    torch.testing.assert_close(out.full_tensor(), full.cumsum(0))
    given = {"a": full, "b": weft.distribute_tensor(full, mesh, P("x"))}
    found: Any = associative_scan(affine, given, 0, combine_mode="generic")
    due: Any = associative_scan(affine, {"a": full, "b": full}, 0, combine_mode="generic")
    torch.testing.assert_close(found["b"].full_tensor(), due["b"])


@pytest.mark.parametrize("kind", ["a leaf", "a sharded tensor"])
def test_a_function_that_closes_over_a_tensor(kind: str) -> None:
    @ranks(x=2)
    def run(mesh: Any) -> None:
        x = weft.rand(6, 4, device_mesh=mesh, placements=P("x"))
        other = torch.ones(4, requires_grad=True) if kind == "a leaf" else x[0]
        with weft.explain() as log, pytest.raises((UnsupportedOpError, weft.StrictError)) as caught:
            associative_scan(lambda one, two: one + two * other, x, 0, combine_mode="generic")
        assert not log.events
        if kind == "a leaf":
            assert str(caught.value).splitlines() == [
                "associative_scan(combine_fn, xs, dim): 1 of 1 results of combine_fn depend on "
                "tensors that are not its arguments, and that require grad or are sharded.",
                "  Rule: a rank combines slices of its shard by itself.",
                "  Offenders: shape (4,)",
                "  Fix: give such a tensor as a part of xs, expanded along the scanned dim",
            ]

    run()


@pytest.mark.parametrize(("mode", "dim", "said"), [
    ("pointwise", 0, "For combine_mode='pointwise', all input tensors need to be on CUDA or XPU"),
    ("wise", 0, "Combine_mode must either 'pointwise' or 'generic', but got wise"),
    ("generic", 2, "Dimension out of range"),
])
@ranks(x=2)
def test_torchs_own_errors(mesh: Any, mode: str, dim: int, said: str) -> None:
    if mode == "pointwise" and torch.__version__ >= "2.14":
        return  # it takes tensors of CPUs
    x = weft.rand(6, 4, device_mesh=mesh, placements=P("x"))
    with pytest.raises((ValueError, IndexError), match=said):
        associative_scan(torch.add, x, dim, combine_mode=mode)


@ranks(x=2)
def test_strict_refuses_the_exchange(mesh: Any) -> None:
    x = weft.rand(6, 4, device_mesh=mesh, placements=P("x"))
    with weft.strict(), pytest.raises(weft.StrictError, match="associative_scan"):
        associative_scan(torch.add, x, 0, combine_mode="generic")
