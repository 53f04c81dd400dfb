"""Statistics along a sharded dim that is short: their results are as large as a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import P
from weft.testing import peak_memory

ALONG: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(1)[0],
    "argmin": lambda x: x.argmin(1) * x.sum(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "std": lambda x: x.std(1),
    "norm": lambda x: x.norm(dim=1),
    "prod": lambda x: x.prod(1),
}


def measured(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, Tensor, Tensor]:
    """The peak of a call and its backward, the result and the gradient."""
    x.requires_grad_()
    with peak_memory(x) as memory:
        out = call(x)
        (out * out).sum().backward()
    assert x.grad is not None
    return memory.peak, out, x.grad


@pytest.mark.parametrize("length", [4, 8])
@pytest.mark.parametrize("name", ALONG)
def test_shards_move_to_another_dim(name: str, length: int) -> None:
    """A result that is whole would be as large as a shard, and so would all that follows."""
    x = torch.randn(1, length, 64, 32, dtype=torch.float64)
    peak, *due = measured(ALONG[name], x.clone())

    def on_rank(mesh: Any) -> int:
        mine = weft.distribute_tensor(x, mesh, P(None, "x"), src_data_rank=None)
        most, *found = measured(ALONG[name], mine)
        assert str(found[0].sharding) == "[1, 64@x, 32]"
        for one, other in zip(found, due):
            torch.testing.assert_close(one.full_tensor(), other)
        return most

    assert max(weft.testing.run(on_rank, mesh={"x": 4})) < 1.7 * peak / 4


@pytest.mark.parametrize("name", ["max", "logsumexp", "std"])
def test_a_long_dim_stays(name: str) -> None:
    """Only statistics travel, which are small."""
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(torch.randn(1, 512, 8), mesh, P(None, "x"), src_data_rank=None)
        with weft.explain() as log:
            assert str(ALONG[name](x).sharding) == "[1, 8]"
        assert log.nbytes <= 4 * 8 * 4 * 8

    weft.testing.run(on_rank, mesh={"x": 4})
