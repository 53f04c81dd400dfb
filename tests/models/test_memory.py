"""Sharded stays sharded: memory of field models falls with the ranks, values stay."""

from __future__ import annotations

import pytest
import torch

from tests.effort import EFFORT
from tests.models.fields import FIELDS
from tests.models.peaks import MESHES, SHARE, measured

HALOS = 1.3
"""Bytes of halos that a whole model receives forward, in those that its convolutions read."""

WAYS = [(mesh, size) for mesh in MESHES for size in ("even", "uneven")
        if size == "uneven" or mesh == "one dim" or (EFFORT >= 1 and mesh == "two dims")]


@pytest.mark.parametrize("mesh, size", WAYS)
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_sharded_stays_sharded(name: str, mesh: str, size: str) -> None:
    found = measured(name, mesh, size)
    expected, *gradients = found.alone.values
    for run in found.ranks:
        out, *grads = run.values
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
        for mine, due in zip(grads, gradients, strict=True):
            torch.testing.assert_close(mine, due, rtol=1e-8, atol=1e-10)
        if name in ("unet", "convnext", "vae"):
            assert 0 < run.received <= HALOS * run.read
    assert found.share <= SHARE, f"{found.share:.2f} of the largest shard; {found.ranks[0].layout}"
