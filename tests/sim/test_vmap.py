"""torch.vmap of functions of ShardTensors, mapped or closed over: values and gradients are those of
one process, and what is sharded stays sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.harness import ranks
from weft import P, ShardTensor, UnsupportedOpError

CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "elementwise": lambda x, y, w: torch.vmap(lambda a, b: a * b.sin())(x, y),
    "product": lambda x, y, w: torch.vmap(lambda a: a @ w)(x),
    "columns": lambda x, y, w: torch.vmap(lambda a: a.cumsum(0), in_dims=1, out_dims=1)(x) * y,
    "twice": lambda x, y, w: torch.vmap(torch.vmap(
        lambda a, b: torch.where(a > b, a, b * 2)))(x, y),
    "all pairs": lambda x, y, w: torch.vmap(lambda a: torch.vmap(lambda b: (a * b).sum())(y))(x),
    "closed over": lambda x, y, w: torch.vmap(lambda a: (a * x).sum(0))(y),
    "reductions": lambda x, y, w: torch.vmap(lambda a: torch.softmax(a, -1) + a.mean())(x),
    "norm": lambda x, y, w: torch.vmap(lambda a: F.layer_norm(a, (6,)))(x),
    "moved inside": lambda x, y, w: torch.vmap(lambda a: a * x[1] + x.cumsum(0)[2])(y),
    "chunks": lambda x, y, w: torch.vmap(lambda a: a.exp(), chunk_size=2)(x),
    "not mapped": lambda x, y, w: torch.vmap(lambda a: x)(y),
    "in place": lambda x, y, w: torch.vmap(lambda a, b: (a * 1).add_(b).mul_(2))(x, y),
    "gradient of each": lambda x, y, w: torch.vmap(
        torch.func.grad(lambda a, b: (a.sin() * b @ w).sum()))(x, y),
}
SPECS = {"rows": P("x"), "columns": P(None, "x"), "both": P("x", "y"), "whole": P()}
AXES = {"x": 3, "y": 2}


@pytest.mark.parametrize(("spec", "is_plain"), [
    ("rows", False), ("rows", True), ("columns", False), ("both", False), ("whole", False)])
@pytest.mark.parametrize("name", CALLS)
def test_as_in_one_process(name: str, spec: str, is_plain: bool) -> None:
    """Four rows on three ranks, six columns on two; `y` is sharded as well, or a plain tensor."""
    torch.manual_seed(0)
    full = [torch.randn(*shape, dtype=torch.float64) for shape in ((4, 6), (4, 6), (6, 3))]

    def results(given: list[Tensor]) -> list[Tensor]:
        out = CALLS[name](*given)
        wanted = [one for one in given if one.requires_grad]
        found = torch.autograd.grad(out.pow(2).sum(), wanted, allow_unused=True)
        return [out, *[one for one in found if one is not None]]

    due = results([one.clone().requires_grad_(not is_plain or at != 1)
                   for at, one in enumerate(full)])

    @ranks(**AXES)
    def run(mesh: Any) -> None:
        x, y, w = (weft.distribute_tensor(one, mesh, SPECS[spec] if at < 2 else P())
                   for at, one in enumerate(full))
        other = full[1] if is_plain else y.requires_grad_()
        found = results([x.requires_grad_(), other, w.requires_grad_()])
        assert len(found) == len(due)
        for one, other in zip(found, due):
            assert isinstance(one, ShardTensor)
            torch.testing.assert_close(one.full_tensor(), other)

    run()


@ranks(x=2)
def test_a_mapped_dim_stays_sharded(mesh: Any) -> None:
    x = weft.rand(8, 4, device_mesh=mesh, placements=P("x"))
    with weft.explain() as log:
        out = torch.vmap(lambda a: torch.softmax(a * 2, -1))(x)
    assert out.sharding == x.sharding and not log.nbytes


def test_a_plain_leaf_is_refused() -> None:
    """Its gradient would be lost in the graph of the wrapper."""
    @ranks(x=2)
    def run(mesh: Any) -> None:
        x = weft.rand(4, 4, device_mesh=mesh, placements=P("x"))
        leaf = torch.ones(4, requires_grad=True)
        with pytest.raises(UnsupportedOpError) as caught:
            torch.vmap(lambda a: a * leaf)(x)
        assert str(caught.value).splitlines() == [
            "torch.func: aten.mul.Tensor meets a ShardTensor and 1 plain tensors that require "
            "grad.",
            "  Rule: under a transform torch would record a graph of the wrapper, which has none.",
            "  Offenders: shape (4,)",
            "  Fix: weft.distribute_tensor(x, mesh, P()), of the plain tensors, before the "
            "transform",
        ]

    run()


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 3  # so that a test sees who has computed it


@pytest.mark.filterwarnings("ignore:.*Doubled:weft.WeftWarning")
@ranks(x=2)
def test_a_function_with_a_batching_rule(mesh: Any) -> None:
    for recorded in (False, True):
        x = weft.rand(4, 4, device_mesh=mesh, placements=P("x")).requires_grad_(recorded)
        out = torch.vmap(Doubled.apply)(x)
        torch.testing.assert_close(out.full_tensor(), (x * 2).full_tensor())
        if recorded:
            out.sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), torch.full((4, 4), 3.0))
