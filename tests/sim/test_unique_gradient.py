"""Distinct elements require a gradient where the tensor does, and have none, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.harness import ranks
from weft import P

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "unique": lambda a: a.unique(),
    "unique of rows": lambda a: a.unique(dim=0),
    "consecutive": lambda a: a.unique_consecutive(),
    "consecutive rows": lambda a: a.unique_consecutive(dim=0),
}


@pytest.mark.parametrize("name", CALLS)
@ranks(x=2)
def test_there_is_no_gradient(mesh: Any, name: str) -> None:
    full = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
    x = weft.distribute_tensor(full, mesh, P("x"), src_data_rank=None).requires_grad_()
    out = CALLS[name](x)
    assert out.requires_grad and out.shape == CALLS[name](full).shape
    with pytest.raises((RuntimeError, NotImplementedError), match="derivative"):
        out.sum().backward()
    with torch.no_grad():
        assert not CALLS[name](x).requires_grad
