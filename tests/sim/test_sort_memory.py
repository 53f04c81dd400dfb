"""What sorts along a sharded dim take of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from weft import P
from weft.testing import peak_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["sort", "argsort", "rows"])
def test_a_sort_takes_little_more_than_its_part(name: str, dtype: torch.dtype) -> None:
    """Orders are remembered in few bytes, and each is forgotten before the next one is made."""
    x = (torch.randn(2, 20000) * 1000).to(dtype)
    sort = torch.argsort if name == "argsort" else torch.sort
    x = x if name == "rows" else x.flatten()
    with peak_memory(x) as one:
        sort(x)

    def on_rank(mesh: Any) -> int:
        mine = weft.distribute_tensor(
            x, mesh, P(*[None] * (x.dim() - 1), "x"), src_data_rank=None)
        with peak_memory(mine) as memory:
            sort(mine)
        return memory.peak

    most = 2.1 if name == "rows" else 1.6
    assert max(weft.testing.run(on_rank, mesh={"x": 4})) < most * one.peak / 4
