"""Solvers by slices and by rolls on real processes, where only messages keep ranks in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gloo import GlooWorld
from tests.models.stencils import SOLVERS, start
from tests.models.test_stencils import SHAPE, fields_on

NUM_STEPS = 4


def solved(mesh: Any, name: str) -> list[torch.Tensor]:
    fields = [one.requires_grad_() for one in fields_on(mesh, "ragged grid")]
    made: Any = fields
    for _ in range(NUM_STEPS):
        made = SOLVERS[name](*made)
    sum((one * one).sum() for one in made).backward()  # type: ignore[union-attr]
    return [one.detach().full_tensor() for one in made] + [one.grad.full_tensor() for one in fields]


@pytest.mark.parametrize("name", SOLVERS)
def test_as_on_one_process(gloo: GlooWorld, name: str) -> None:
    fields = [one.requires_grad_() for one in start(*SHAPE)]
    made: Any = fields
    for _ in range(NUM_STEPS):
        made = SOLVERS[name](*made)
    sum((one * one).sum() for one in made).backward()  # type: ignore[union-attr]
    due = [*made, *[one.grad for one in fields]]
    for found in gloo.run(solved, {"x": 2, "y": 2}, name):
        for mine, one in zip(found, due, strict=True):
            torch.testing.assert_close(mine, one.detach(), rtol=1e-11, atol=1e-11)
