"""No call receives more bytes than the table of bounds allows, and the table is no looser."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.cases.bounds import BOUNDS, LAYOUTS, Bound
from tests.harness import flat
from tests.oracle import block
from weft import ShardTensor

ROWS = [pytest.param(bound, name, id=f"{bound.name}-{name}")
        for bound in BOUNDS for name in bound.nbytes]


def received(bound: Bound, name: str, on: Any) -> tuple[int, int]:
    """Bytes that this rank receives, forward and backward."""
    layout = LAYOUTS[name]
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(layout.shape, generator=generator, dtype=torch.float64)
    x = ShardTensor.from_local(block(layout, whole, on.here), on, layout)
    x.requires_grad_(bound.grad)
    with weft.explain() as log:
        out = bound.fn(x)
        if bound.grad:
            for one in flat(out):
                if one.requires_grad:
                    dual = one.sharding.replace(partial=None)
                    gradient = ShardTensor.from_local(torch.ones_like(one.to_local()), on, dual)
                    one.backward(gradient, retain_graph=True)
    totals = {"forward": 0, "backward": 0}
    for event in log.events:
        totals[event.direction] += event.nbytes
    return totals["forward"], totals["backward"]


@pytest.mark.parametrize("bound, name", ROWS)
def test_bytes(bound: Bound, name: str) -> None:
    mesh = LAYOUTS[name].mesh
    found = weft.testing.run(lambda on: received(bound, name, on), mesh.size(), mesh)
    most = tuple(map(max, zip(*found)))
    for got, allowed in zip(most, bound.nbytes[name]):
        assert got <= allowed <= 1.25 * got, f"received {most}, allowed {bound.nbytes[name]}"
