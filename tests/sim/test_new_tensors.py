"""Tensors made by `x.new_zeros(...)` and its kin are sharded as x in the dims that they share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.harness import ranks
from weft import P


@pytest.mark.parametrize("shape, specs, made, due", [
    ((8,), P("x"), (8, 5), "[8@x, 5]"),
    ((8,), P("x"), (5, 8), "[5, 8@x]"),
    ((8,), P("x"), (8, 8), "[8, 8@x]"),
    ((8,), P("x"), (8, 2, 3), "[8@x, 2, 3]"),
    ((8,), P("x"), (9, 5), "[9, 5]"),
    ((6, 8), P("x"), (6, 8, 2), "[6@x, 8, 2]"),
    ((8, 6), P(None, "x"), (8, 6, 4), "[8, 6@x, 4]"),
    ((8, 8), P("x"), (8, 8, 4), "[8@x, 8, 4]"),
    ((8, 8), P("x"), (8, 8, 8), "[8, 8@x, 8]"),
    ((8, 8), P("x"), (3, 10, 12), "[3, 10, 12]"),
    ((8, 8), P("x"), (3, 8, 12), "[3, 8@x, 12]"),
    ((), P(), (8, 2), "[8, 2]"),
])
@ranks(x=2)
def test_dims_of_the_tensor_stay_sharded(
    mesh: Any, shape: Any, specs: P, made: Any, due: str
) -> None:
    x = weft.distribute_tensor(torch.ones(shape), mesh, specs)
    for out in (x.new_zeros(made), x.new_empty(*made), x.new_full(made, 2), x.new_ones(made)):
        assert str(out.sharding) == due


@ranks(x=4)
def test_columns_of_a_basis_stay_sharded(mesh: Any) -> None:
    full = torch.arange(32.0).double()
    b = weft.distribute_tensor(full, mesh, P("x"))
    with weft.strict():
        basis = b.new_zeros(len(b), 3)
        for at in range(3):
            basis[:, at] = b * at
    assert str(basis.sharding) == "[32@x, 3]"
    assert torch.equal(basis.full_tensor(), full[:, None] * torch.arange(3))
