"""Random numbers over processes: as on simulated ranks, bit by bit; seeds that differ raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
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


def differently(mesh: Any, debug: bool) -> str:
    torch.manual_seed(5 if debug else mesh.rank)
    with pytest.raises(CommunicationError) as caught:
        weft.rand(3, mesh=mesh)
        with weft.debug():
            if mesh.rank == 3:
                weft.set_rng_state((5, 9))
            weft.rand(3, mesh=mesh)
    torch.manual_seed(5)
    return str(caught.value)


@pytest.mark.parametrize("debug", [False, True])
def test_ranks_that_differ_are_told(gloo: GlooWorld, debug: bool) -> None:
    for said in gloo.run(differently, MESH, debug):
        assert "different random states" in said
        assert ("rank 3: seed 5, call 9" if debug else "rank 3: seed 3, call 0") in said


def on_parts(mesh: Any, members: bool) -> list[Any]:
    """Draws on meshes with ranks outside, by all or by members alone, among draws of all ranks."""
    torch.manual_seed(5)
    pair, three = weft.init_mesh({"x": 2}, ranks=(3, 1)), weft.init_mesh({"x": 3}, ranks=(0, 1, 2))
    found: list[Any] = []
    for part in (mesh, pair, mesh["tp"], three, pair, mesh, three, mesh["dp"], mesh):
        inside = part.here is not None
        if inside or not members:
            made = F.dropout(weft.rand(9, mesh=part, spec=P(0)) + 1, 0.5)
        found.append(made.full_tensor() if inside else None)
    torch.set_rng_state(torch.get_rng_state())
    found += [weft.rand(5, mesh=mesh).full_tensor(), weft.rand(5, mesh=mesh["tp"]).full_tensor()]
    return found


def test_parts_of_a_mesh_never_drift(gloo: GlooWorld) -> None:
    expected = weft.testing.run(lambda mesh: on_parts(mesh, False), mesh=MESH)
    for members in (False, True):
        found = gloo.run(on_parts, MESH, members)
        for mine, due in zip(found, expected, strict=True):
            for one, other in zip(mine, due, strict=True):
                assert one is other is None or torch.equal(one, other)
    for draws in zip(*expected):  # which is one tensor on all ranks that hold it
        held = [one for one in draws if one is not None]
        assert all(torch.equal(one, held[0]) for one in held)


def slices_of_torchs(mesh: Any) -> list[Tensor]:
    """Rows of a torch DeviceMesh draw as those of weft's, whole ones as all ranks do."""
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    own = [weft.rand(4, mesh=one).full_tensor() for one in (mesh["tp"], mesh["dp"], mesh)]
    torch.manual_seed(5)
    taken = [weft.rand(4, mesh=one).full_tensor()
             for one in (theirs["tp"], theirs["dp"], theirs._flatten("all"))]
    assert all(map(torch.equal, own, taken))
    return own


def test_rows_of_torchs_meshes_are_replicas(gloo: GlooWorld) -> None:
    found = gloo.run(slices_of_torchs, MESH)
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, found[0]))
