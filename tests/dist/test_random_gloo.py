"""Random numbers over processes: as on simulated ranks, bit by bit; seeds that differ raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from tests.gloo import GlooWorld
from weft import CommunicationError, P

MESH = {"dp": 2, "tp": 2}
SPECS = [P("dp", "tp"), P(("tp", "dp")), P(None, "tp"), P()]


def numbers(mesh: Any, spec: P) -> list[Tensor]:
    torch.manual_seed(5)
    torch.rand(mesh.rank + 1)  # a rank's own draws change nothing
    x = weft.randn(9, 6, mesh=mesh, spec=spec, requires_grad=True)
    y = checkpoint(lambda a: F.dropout(a.tanh(), 0.5), F.dropout(x, 0.25), use_reentrant=False)
    y.sum().backward()
    made = [x, y, x.grad, weft.randint(1000, (7, 5), mesh=mesh, spec=spec), torch.bernoulli(x * 0),
            weft.zeros(5, 4, mesh=mesh, spec=spec).exponential_(), weft.randperm(13, mesh=mesh)]
    return [one.detach().full_tensor() for one in made]


def on_rank(mesh: Any, place: int) -> list[Tensor]:
    return numbers(mesh, SPECS[place])


@pytest.mark.parametrize("place", range(len(SPECS)))
def test_as_on_simulated_ranks(gloo: GlooWorld, place: int) -> None:
    expected = weft.testing.run(lambda mesh: numbers(mesh, P()), mesh={"dp": 1, "tp": 1})[0]
    for found in gloo.run(on_rank, MESH, place):
        assert all(map(torch.equal, found, expected))


def differently(mesh: Any, debug: bool) -> None:
    torch.manual_seed(5 if debug else mesh.rank)
    weft.rand(3, mesh=mesh)
    with weft.debug():
        if mesh.rank == 3:
            weft.set_rng_state((5, 9))
        weft.rand(3, mesh=mesh)


@pytest.mark.parametrize("debug", [False, True])
def test_ranks_that_differ_are_told(gloo: GlooWorld, debug: bool) -> None:
    for error in gloo.outcomes(differently, MESH, debug):
        assert isinstance(error, CommunicationError)
        assert "different random states" in str(error)
        assert ("rank 3: seed 5, call 9" if debug else "rank 3: seed 3, call 0") in str(error)
