"""Parameters gathered by groups over processes: the same bits as on simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.gloo import GlooWorld
from tests.sim.test_groups import CASES, IDS, TABLES, gradients, make
from weft import P


def trained(mesh: Any, name: str, table: str) -> dict[str, Tensor]:
    program, change = CASES[name]
    model = make(change)
    weft.distribute_module(model, mesh, shardings=TABLES[table])
    program(model, weft.distribute_tensor(IDS, mesh, P("dp")))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return gradients(model)


@pytest.mark.parametrize(("name", "table"), [("two steps", "2-D"), ("checkpoints", "last dims")])
def test_groups_over_gloo(gloo: GlooWorld, name: str, table: str) -> None:
    axes = {"dp": 2, "tp": 2}
    expected = weft.testing.run(lambda mesh: trained(mesh, name, table), mesh=axes)
    for mine, same in zip(gloo.run(trained, axes, name, table), expected):
        assert mine.keys() == same.keys()
        assert all(torch.equal(mine[each], same[each]) for each in same)
