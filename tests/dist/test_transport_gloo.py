"""Plans and transitions over gloo give what they give over simulated ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.dtypes import MEMORY, dtypes_in, faults, run_rows
from tests.cases.dtypes import MESH as dtypes_mesh
from tests.effort import drawn
from tests.execute import execute
from tests.gloo import GlooWorld
from tests.sim.test_transport_execute import held, integers, judge, terms_of
from tests.sim.test_transport_gradient import run_row, sides
from tests.transitions import layouts
from weft.comm import BoundMesh, run_simulated
from weft.core import Mesh
from weft.planner import plan
from weft.transport import Transition

MESH = Mesh((2, 2))


def every_pair(mesh: BoundMesh, pieces: bool) -> list[Tensor]:
    assert mesh.here is not None
    limits = {comm: comm.swaps_from_nbytes for comm in map(mesh.comm, [(0,), (1,), (0, 1)])}
    for comm in limits:
        comm.swaps_from_nbytes = 0 if pieces else math.inf
    try:
        return _every_pair(mesh)
    finally:
        for comm, limit in limits.items():
            comm.swaps_from_nbytes = limit


def _every_pair(mesh: BoundMesh) -> list[Tensor]:
    assert mesh.here is not None
    return [
        execute(plan(src, dst), held(src, terms_of(src, integers), mesh.here), mesh)
        for src, dst in itertools.product(layouts(MESH, (5,)), repeat=2)
    ]


def every_row(mesh: BoundMesh) -> list[dict[str, Tensor]]:
    made: dict[Any, Transition] = {}
    return [run_row(src, dst, mesh, made)
            for src, dst in drawn([*itertools.product(sides(MESH, (3,)), repeat=2)])]


@pytest.mark.parametrize("pieces", [False, True])
def test_every_pair(gloo: GlooWorld, pieces: bool) -> None:
    ranks = gloo.run(every_pair, MESH, pieces)
    for number, (src, dst) in enumerate(itertools.product(layouts(MESH, (5,)), repeat=2)):
        judge(plan(src, dst), integers, [parts[number] for parts in ranks])


def test_gradients_of_every_row(gloo: GlooWorld) -> None:
    simulated = run_simulated(every_row, 4, MESH)
    for expected, found in zip(simulated, gloo.run(every_row, MESH)):
        for row, mine in zip(expected, found):
            for name, tensor in row.items():
                torch.testing.assert_close(mine[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("memory", MEMORY)
def test_every_dtype_from_every_memory(gloo: GlooWorld, memory: str) -> None:
    dtypes = dtypes_in(memory)
    ranks = gloo.run(rows_of_dtypes, dtypes_mesh, dtypes, memory)
    for number, dtype in enumerate(dtypes):
        assert faults([results[number] for results in ranks], dtype) == [], dtype


def rows_of_dtypes(mesh: BoundMesh, dtypes: list[torch.dtype], memory: str) -> list[Any]:
    return [run_rows(mesh, dtype, memory) for dtype in dtypes]
