"""Norms of many gradients: one collective, several meshes, all orders; then optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.harness import ranks
from weft import P

SHAPES = [(5, 4), (7,), (3, 2, 2), (1,), (6, 3)]


def grads() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.double) for shape in SHAPES]


def plain_params(dtype: torch.dtype = torch.double) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    for one, grad in zip(made, grads()):
        one.grad = grad.to(dtype)
    return made


def params(places: list[tuple[Any, Any]], dtype: torch.dtype = torch.double) -> list[Any]:
    made = []
    for shape, grad, (mesh, spec) in zip(SHAPES, grads(), places):
        one = nn.Parameter(weft.distribute_tensor(torch.ones(shape, dtype=dtype), mesh, spec))
        one.grad = weft.distribute_tensor(grad.to(dtype), mesh, spec)
        made.append(one)
    return made


SPECS = [P("x"), P("y"), P(None, "y", "x"), P(), P("x", "y")]


@pytest.mark.parametrize("order", [2.0, 1.0, 3.5, float("inf"), 0.0])
@pytest.mark.parametrize("foreach", [None, False])
def test_one_collective_for_all(order: float, foreach: bool | None) -> None:
    plain = plain_params()
    expected = nn.utils.clip_grad_norm_(plain, 0.5, order, foreach=foreach)

    @ranks(x=2, y=3)
    def on_rank(mesh: Any) -> None:
        mine = params([(mesh, spec) for spec in SPECS])
        with weft.explain() as log:
            norm = nn.utils.clip_grad_norm_(mine, 0.5, order, foreach=foreach)
        assert order == 0 or [one.collective for one in log.events] == ["AllGather"]
        torch.testing.assert_close(norm.full_tensor(), expected)
        for one, other in zip(mine, plain):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)

    on_rank()


@ranks(x=2)
def test_dtypes_and_what_is_not_finite(mesh: Any) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        expected = nn.utils.clip_grad_norm_(plain_params(dtype), 0.5)
        norm = nn.utils.clip_grad_norm_(params([(mesh, P("x"))] * 5, dtype), 0.5)
        assert norm.dtype == dtype
        torch.testing.assert_close(norm.full_tensor(), expected)
    mine = params([(mesh, P("x"))] * 5)
    mine[0].grad.mul_(float("inf"))
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(mine, 0.5, error_if_nonfinite=True)


def test_several_meshes_are_clipped_by_one_norm_and_stepped_together() -> None:
    plain = plain_params()
    expected = nn.utils.clip_grad_norm_(plain, 0.5)
    torch.optim.AdamW(plain, lr=0.1, foreach=True).step()

    @ranks(x=4)
    def on_rank(mesh: Any) -> None:
        first = weft.Mesh({"a": 2}, ranks=[0, 1])
        other = weft.Mesh({"b": 3}, ranks=[1, 2, 3])
        places = [(first, P("a")), (mesh, P("x")), (other, P("b")), (first, P()), (mesh, P())]
        for fused in (False, True):
            mine = params(places)
            norm = nn.utils.clip_grad_norm_(mine, 0.5)
            torch.testing.assert_close(norm, expected)
            torch.optim.AdamW(mine, lr=0.1, foreach=not fused, fused=fused).step()
            for one, value in zip(mine, plain):
                if one.device_mesh.here is not None:
                    torch.testing.assert_close(one.detach().full_tensor(), value.detach())

    on_rank()
