"""What sums at places of a small target take of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import P
from weft.testing import peak_memory


def histograms(x: Tensor) -> Tensor:
    """The sum of what falls into each of 64 bins, of each row."""
    bins = (x.detach() * 64).long()
    return x.new_zeros(x.shape[0], 64).scatter_add(1, bins, x)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_histogram_takes_its_part(dim: int) -> None:
    """Each rank adds its own values, and makes no places of single elements."""
    x = torch.rand(8, 20000, dtype=torch.float64)

    def trained(x: Tensor) -> tuple[int, Tensor, Tensor]:
        x.requires_grad_()
        with peak_memory(x) as memory:
            out = histograms(x)
            (out * out).sum().backward()
        assert x.grad is not None
        return memory.peak, out.detach(), x.grad

    peak, *due = trained(x.clone())

    def on_rank(mesh: Any) -> int:
        spec = P(*[None] * dim, "x")
        mine, *found = trained(weft.distribute_tensor(x, mesh, spec, src_data_rank=None))
        for one, other in zip(found, due):
            torch.testing.assert_close(one.full_tensor(), other)
        return mine

    assert max(weft.testing.run(on_rank, mesh={"x": 4})) < 1.1 * peak / 4
