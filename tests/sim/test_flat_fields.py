"""What fields of few channels take of memory when they are flattened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import P
from weft.testing import peak_memory


def flattened(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """The peak, the result and the gradient of a field as one dim."""
    x.requires_grad_()
    with peak_memory(x) as memory:
        out = x.reshape(-1) * 2
        (out * out).sum().backward()
    assert x.grad is not None
    return memory.peak, out.detach(), x.grad


@pytest.mark.parametrize("shape", [(3, 64, 96), (3, 95, 97)], ids=str)
@pytest.mark.parametrize(("mesh", "spec"), [
    ({"x": 4}, P(None, None, "x")),
    ({"x": 4}, P(None, "x")),
    ({"x": 2, "y": 2}, P(None, "x", "y")),
], ids=["columns", "rows", "both"])
def test_no_rank_names_every_element(
    shape: tuple[int, ...], mesh: dict[str, int], spec: P
) -> None:
    """With fewer channels than ranks, runs of elements change ranks, not one by one."""
    x = torch.randn(shape, dtype=torch.float64)
    peak, *due = flattened(x.clone())

    def on_rank(mesh: Any) -> int:
        most, *found = flattened(weft.distribute_tensor(x, mesh, spec, src_data_rank=None))
        for one, other in zip(found, due):
            assert torch.equal(one.full_tensor(), other)
        return most

    assert max(weft.testing.run(on_rank, mesh=mesh)) < 1.25 * peak / 4
