"""Sharded stays sharded: memory of field models falls with the ranks, values stay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import weft
from tests.models.fields import FIELDS
from weft import Layout, P
from weft.ops.attending import tiles
from weft.testing import peak_memory

MESHES = {"one dim": ({"x": 4}, ("x",)), "two dims": ({"x": 2, "y": 2}, ("x", "y"))}

SHARE = 1.5
"""The peak of a rank, as a multiple of its part of the peak of one process."""


def trained(mesh: Any, name: str, shape: tuple[int, ...], spec: P) -> tuple[Any, ...]:
    model, field = FIELDS[name].make(shape)
    if mesh is not None:
        weft.distribute_module(model, mesh)
        field = weft.distribute_tensor(field, mesh, spec)
    field.requires_grad_()
    torch.manual_seed(1)
    with peak_memory(model, field) as memory:
        out = model(field)
        (out * out).mean().backward()
    grads = [field.grad, *[one.grad for one in model.parameters()]]
    if mesh is None:
        return (memory.peak,)
    return (memory.peak, out.detach().full_tensor(),
            [one.full_tensor() for one in grads], out.sharding)


@pytest.mark.parametrize("size", ["even", "uneven"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_sharded_stays_sharded(
    name: str, mesh: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiles._TILE_SCORES, "cpu", 1 << 12)  # a tile is small, as the fields are
    axes, names = MESHES[mesh]
    shape = getattr(FIELDS[name], size)
    spec = P(None, None, *names)
    alone, *_ = trained(None, name, shape, spec)
    [(_, expected, gradients, _)] = weft.testing.run(  # its random numbers are weft's
        lambda mesh: trained(mesh, name, shape, P()), mesh={"x": 1})
    before = weft.warn_if_whole(None)  # memory is judged here, by its figure
    try:
        ranks = weft.testing.run(lambda mesh: trained(mesh, name, shape, spec), mesh=axes)
    finally:
        weft.warn_if_whole(before)
    for _, out, grads, _ in ranks:
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
        for mine, due in zip(grads, gradients):
            torch.testing.assert_close(mine, due, rtol=1e-8, atol=1e-10)
    *_, layout = ranks[0]
    largest = max(_largest(Layout(layout.mesh, shape, spec)), _largest(layout))
    share = max(peak for peak, *_ in ranks) / alone / largest
    assert share <= SHARE, f"{share:.2f} of the largest shard, {alone} bytes alone; {layout}"


def _largest(layout: Layout) -> float:
    """The largest shard, as a part of the tensor; 0 where ranks hold terms of it."""
    if any(layout.partial):
        return 0.0
    sizes = [max(layout.sizes_of(dim)) / max(length, 1) for dim, length in enumerate(layout.shape)]
    return math.prod(sizes) if layout.sharded_axes else 0.0
