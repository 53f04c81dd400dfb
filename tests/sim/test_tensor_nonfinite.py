"""Terms are reduced before a number or tensor makes them infinite: their sum would be nan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import Partial, ShardTensor

CALLS: dict[str, Callable[[Any], Tensor]] = {
    "divided by 0.0": lambda x: x / 0.0,
    "divided by 0": lambda x: x / 0,
    "divided by zeros": lambda x: x / torch.zeros(4),
    "times inf": lambda x: x * math.inf,
    "times -inf": lambda x: -math.inf * x,
    "times nan": lambda x: x * math.nan,
    "divided by inf": lambda x: x / math.inf,
}


@pytest.mark.parametrize("name", CALLS)
def test_terms_and_infinity(name: str) -> None:
    dense = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

    def on_rank(mesh: Any) -> Tensor:
        x = ShardTensor.from_local(dense * (2.0 if mesh.rank else -1.0), mesh, [Partial()])
        CALLS[name](x * 3.0)  # finite numbers first: what they leave in the cache must not serve
        return CALLS[name](x).full_tensor()

    for value in weft.testing.run(on_rank, 2, {"tp": 2}):
        torch.testing.assert_close(value, CALLS[name](dense), rtol=0, atol=0, equal_nan=True)


def test_finite_numbers_leave_terms_unreduced() -> None:
    def on_rank(mesh: Any) -> tuple[bool, bool]:
        x = ShardTensor.from_local(torch.ones(3), mesh, [Partial()])
        return (x * 2.0).sharding.is_partial, (x / 2).sharding.is_partial

    assert weft.testing.run(on_rank, 2, {"tp": 2}) == [(True, True)] * 2
