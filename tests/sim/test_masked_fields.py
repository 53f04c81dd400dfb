"""Selections by masks of one sample, whose rows are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.harness import ranks
from weft import P
from weft.testing import peak_memory

SHAPES = [(1, 1, 64, 48), (1, 3, 64, 48), (3, 64, 48)]


def selected(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """The peak, what is positive, and the gradient."""
    x.requires_grad_()
    with peak_memory(x) as memory:
        out = x[x.detach() > 0] * 2
        (out * out).sum().backward()
    assert x.grad is not None
    return memory.peak, out.detach(), x.grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rank_selects_of_its_rows(shape: tuple[int, ...]) -> None:
    """A first dim of one element would leave all of it to one rank."""
    x = torch.randn(shape, dtype=torch.float64)
    peak, *due = selected(x.clone())

    def on_rank(mesh: Any) -> int:
        spec = P(*[None] * (len(shape) - 2), "x")
        most, *found = selected(weft.distribute_tensor(x, mesh, spec, src_data_rank=None))
        for one, other in zip(found, due):
            assert torch.equal(one.full_tensor(), other)
        return most

    assert max(weft.testing.run(on_rank, mesh={"x": 4})) < 1.25 * peak / 4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@ranks(x=4)
def test_places_and_writes(mesh: Any, shape: tuple[int, ...]) -> None:
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    spec = P(*[None] * (len(shape) - 2), "x")
    x = weft.distribute_tensor(full, mesh, spec, src_data_rank=None)
    mask = x > 0
    assert torch.equal(mask.nonzero().full_tensor(), (full > 0).nonzero())
    assert mask.nonzero().stride() == (full > 0).nonzero().stride()
    for one, due in zip(mask.nonzero(as_tuple=True), (full > 0).nonzero(as_tuple=True)):
        assert torch.equal(one.full_tensor(), due)
    values = torch.arange(full.numel(), dtype=full.dtype)
    out = x.masked_scatter(mask, values)
    assert torch.equal(out.full_tensor(), full.masked_scatter(full > 0, values))
    assert out.sharding == x.sharding
    due = full.clone()
    due[full > 0] = values[: int((full > 0).sum())]
    x[mask] = values[: len(due[full > 0])]
    assert torch.equal(x.full_tensor(), due)
