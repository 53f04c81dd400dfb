"""Unsigned integers wider than a byte, shifts of bools, and indices that nothing is read by: what
torch does on one process, also where its kernels for parts of the work lack a dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.sharded import WAYS, Make, agree

LINE = torch.tensor([3, 2**15 + 5, 3, 65535, 0])
GRID = torch.tensor([[3, 60000], [1, 2], [3, 60000], [40000, 0], [2, 1]])
PICKS = torch.tensor([4, 0, 2, 0])
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]

ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "sort": lambda x, y: [*x.sort(), *y.sort(0, descending=True, stable=True)],
    "argsort": lambda x, y: [x.argsort(stable=True), y.argsort(1, stable=True)],
    "msort": lambda x, y: [x.msort(), y.msort()],
    "unique": lambda x, y: [*x.unique(return_inverse=True, return_counts=True), y.unique()],
    "unique rows": lambda x, y: y.unique(dim=0),
    "consecutive": lambda x, y: [*x.unique_consecutive(return_counts=True)],
    "index": lambda x, y: [x[PICKS], y[PICKS], y[:, PICKS % 2], y[PICKS, PICKS % 2], y[PICKS[:1]]],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
@pytest.mark.parametrize("name", ORDERS)
def test_unsigned_integers(name: str, dtype: torch.dtype, way: str) -> None:
    def program(make: Make) -> Any:
        out = ORDERS[name](make(LINE.to(dtype)), make(GRID.to(dtype)))
        outs = out if isinstance(out, list) else [out]
        return [[one.long(), str(one.dtype)] for one in outs]

    agree(program, way)


SHIFTS: dict[str, Callable[[Any, Any], Any]] = {
    "bool << 1": lambda b, i: b << 1,
    "bool >> 1": lambda b, i: b >> 1,
    "int << bool": lambda b, i: i << b,
    "int >> bool": lambda b, i: i >> b,
    "1 << bool": lambda b, i: 1 << b,
    "bool << bool": lambda b, i: b << b,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHIFTS)
def test_shifts_of_bools(name: str, way: str) -> None:
    agree(lambda make: SHIFTS[name](make(GRID) > 2, make(GRID)), way)


FAR = torch.tensor([9])
NOTHING: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: x[FAR],
    "negative": lambda x: x[-FAR],
    "of a block": lambda x: x.unsqueeze(1).expand(-1, 3, -1)[FAR, FAR],
    "put": lambda x: x.index_put((FAR,), torch.ones(()).double()),
    "add": lambda x: x.index_add(0, FAR, torch.ones(1, 0).double()),
    "copy": lambda x: x.index_copy(0, FAR, torch.ones(1, 0).double()),
    "fill": lambda x: x.index_fill(0, FAR, 2.0),
    "into nothing": lambda x: x[:0][FAR],  # which torch refuses
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NOTHING)
def test_indices_by_which_nothing_is_read(name: str, way: str) -> None:
    def program(make: Make) -> Any:
        x = make(GRID.double()[:, :0])
        out = NOTHING[name](x)
        out.sum().backward()
        return [out, x.grad, out.requires_grad]

    agree(program, way)
