"""Redistribution over gloo: the bytes that torch.distributed is given, and runs under way."""

from __future__ import annotations

import itertools
import random
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch.distributed import distributed_c10d

import weft
from bench.collectives import Collectives
from tests.dist.test_exit import START, torchrun
from tests.gloo import GlooWorld
from tests.oracle import block
from tests.sim.test_redistribute_across import check_two_stages, two_stages
from tests.sim.test_transport_across import MESHES as ACROSS
from tests.transitions import layouts
from weft import Layout, P, ShardTensor
from weft.core import Mesh
from weft.transport.in_flight import InFlight

MESH = Mesh({"dp": 2, "tp": 2})
ROWS = [  # those of other systems' figures, on 2x2
    (P("dp", "tp"), P("tp", "dp")), (P(("dp", "tp")), P(None, ("dp", "tp"))), (P("dp"), P("tp")),
    (P("dp", "tp"), P("tp")), (P("tp"), P(("dp", "tp"))), (P("dp"), P(None, "dp")),
    (P("dp"), P()), (P(("tp", "dp")), P(("dp", "tp"))),
]


def pairs_of(shape: tuple[int, ...]) -> list[tuple[Layout, Layout]]:
    """The rows, and some of all pairs without partial axes, ragged ones included."""
    rows = [(Layout(MESH, shape, one), Layout(MESH, shape, other)) for one, other in ROWS]
    all_pairs = list(itertools.product(layouts(MESH, shape, ()), repeat=2))
    return rows + [(one, other) for one, other in random.Random(0).sample(all_pairs, 60)]


def dense(src: Layout, dst: Layout) -> bool:
    """Whether every rank has something for every other one."""
    ends = itertools.product(map(src.box, range(4)), map(dst.box, range(4)))
    return all(
        max(a, c) < min(b, d) for held, wanted in ends for (a, b), (c, d) in zip(held, wanted)
    )


def missing(src: Layout, dst: Layout, at: tuple[int, ...]) -> int:
    """Elements of its new block that a rank does not hold, by plain arithmetic."""
    numbers = torch.arange(torch.Size(src.shape).numel()).view(src.shape)
    held, wanted = block(src, numbers, at), block(dst, numbers, at)
    return int((~torch.isin(wanted, held)).sum())


def bytes_of_pairs(mesh: Any, shape: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """(received forward, sent forward, received backward, calls) of each pair."""
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    found = []
    for src, dst in pairs_of(shape):
        local = block(src, full, mesh.here).contiguous()
        x = ShardTensor.from_local(local, mesh, src).requires_grad_()
        with Collectives() as forward:
            y = x.redistribute(placements=dst)
        assert torch.equal(y.detach().to_local(), block(dst, full, mesh.here)), f"{src} -> {dst}"
        with Collectives() as backward:
            y.backward(gradient=y.detach())
        assert torch.equal(x.grad.to_local(), local), f"{src} -> {dst}"
        found.append((forward.received, forward.sent, backward.received, forward.calls))
    return found


@pytest.mark.parametrize("shape", [(5, 6), (301, 402)])
def test_no_more_than_the_missing_bytes_are_handed_over(
    gloo: GlooWorld, shape: tuple[int, ...]
) -> None:
    """Small ones between all ranks go by one all-to-all, others piece by piece."""
    ranks = gloo.run(bytes_of_pairs, MESH, shape)
    assert sum(dense(*pair) for pair in pairs_of(shape)) > 3
    for number, (src, dst) in enumerate(pairs_of(shape)):
        for position, results in enumerate(ranks):
            at, (received, _, back, calls) = MESH.coordinate(position), results[number]
            assert received == 4 * missing(src, dst, at), f"{src} -> {dst} at {at}"
            assert back == 4 * missing(dst, src, at), f"{dst} -> {src} at {at}"
            assert shape == (301, 402) or calls <= 1 or not dense(src, dst)
        assert sum(one[number][1] for one in ranks) == sum(one[number][0] for one in ranks)


def bytes_of_scatter(mesh: Any, spec: P) -> tuple[Any, int]:
    """What a rank hands over, and the bytes of its block."""
    full = torch.randn(301, 402, generator=torch.Generator().manual_seed(0))
    weft.scatter_tensor(full if mesh.rank == 1 else None, 1, mesh, spec)  # groups are made
    with Collectives() as seen:
        x = weft.scatter_tensor(full if mesh.rank == 1 else None, 1, mesh, spec)
    assert torch.equal(x.to_local(), block(x.sharding, full, mesh.here))
    return seen, x.to_local().nbytes


@pytest.mark.parametrize("spec", [P("dp", "tp"), P("tp"), P(), P(None, "dp")], ids=str)
def test_one_copy_leaves_the_source(gloo: GlooWorld, spec: P) -> None:
    ranks = gloo.run(bytes_of_scatter, MESH, spec)
    told = 4 * 256 * 2  # the exchange of shapes and dtypes
    total, cut = 301 * 402 * 4, any(spec.entries)
    for rank, (seen, own) in enumerate(ranks):
        assert seen.broadcast == (own if spec != P("dp", "tp") else 0)
        assert seen.received - told <= own
        assert seen.sent - told <= (total - own if rank == 1 and cut else 0)


def started(mesh: Any, shape: tuple[int, ...]) -> list[Any]:
    """Results that all ranks use, that one rank uses, and that nobody does."""
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = weft.distribute_tensor(full, mesh, P("dp")).requires_grad_()
    terms = weft.distribute_tensor(full, mesh, P(partial={"dp": "sum"}))
    unused = x.redistribute(placements=P(None, "tp"), async_op=True)
    kept = [terms.redistribute(placements=spec, async_op=True) for spec in (P(), P("dp"))]
    y = x.redistribute(placements=P(), async_op=True)
    z = x.redistribute(placements=P("tp"), async_op=True)
    assert {type(one._local) for one in (unused, y, z, *kept)} == {InFlight}
    if mesh.rank == 2:
        assert torch.equal(z.detach().to_local(), block(z.sharding, full, mesh.here))
    (y * y + z).sum().backward()
    assert torch.equal(x.grad.to_local(), block(x.sharding, 2 * full + 1, mesh.here))
    if mesh.rank < 2:  # sums of the value and of zeros: exact
        for one in kept:
            assert torch.equal(one.to_local(), block(one.sharding, full, mesh.here))
    return [type(unused._local) is InFlight]


@pytest.mark.parametrize("shape", [(5, 3), (300, 401)])
def test_runs_under_way(gloo: GlooWorld, shape: tuple[int, ...]) -> None:
    for _ in range(3):
        assert gloo.run(started, MESH, shape) == [[True]] * 4




def late(mesh: Any, run: str) -> None:
    """The last rank starts when all others say that they have: none of them waits for it."""
    x = weft.ones(4000, 100, mesh=mesh, spec=P(("dp", "tp")))
    x.redistribute(placements=P())
    mesh.comm((0, 1)).exchange(None)
    store = distributed_c10d._get_default_store()
    if mesh.rank == 3:
        store.wait([f"{run}/{rank}" for rank in range(3)], timedelta(seconds=20))
    y = x.redistribute(placements=P(), async_op=True)
    store.set(f"{run}/{mesh.rank}", "")
    assert y.sum().item() == 400_000


def test_starting_does_not_wait(gloo: GlooWorld) -> None:
    gloo.run(late, MESH, uuid4().hex)


@pytest.mark.parametrize("meshes", ACROSS)
def test_two_meshes(gloo: GlooWorld, meshes: str) -> None:
    check_two_stages(meshes, gloo.run(two_stages, (4,), meshes, True))


def across(mesh: Any, meshes: str, shape: tuple[int, ...]) -> list[Any]:
    """(received, sent, what is due) of moves from one mesh to another."""
    one, other = (weft.init_mesh(mesh) for mesh in ACROSS[meshes])
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    found = []
    for src, dst in pairs_across(meshes, shape):
        local = full.new_empty(0) if one.here is None else block(src, full, one.here).contiguous()
        x = ShardTensor.from_local(local, one, src)
        x.redistribute(other, dst)  # groups are made
        with Collectives() as seen:
            y = x.redistribute(other, dst)
        wanted = full.new_empty(0) if other.here is None else block(dst, full, other.here)
        assert torch.equal(y.to_local(), wanted), f"{src} -> {dst}"
        due = int((~torch.isin(wanted, local)).sum()) * 4
        found.append((seen.received, seen.sent, due))
    return found


def pairs_across(meshes: str, shape: tuple[int, ...]) -> list[tuple[Layout, Layout]]:
    one, other = ACROSS[meshes]
    pairs = list(itertools.product(layouts(one, shape, ()), layouts(other, shape, ())))
    return random.Random(0).sample(pairs, min(20, len(pairs)))


@pytest.mark.parametrize("shape", [(5, 6), (301, 402)])
@pytest.mark.parametrize("meshes", ACROSS)
def test_no_more_than_the_missing_bytes_between_meshes(
    gloo: GlooWorld, meshes: str, shape: tuple[int, ...]
) -> None:
    ranks = gloo.run(across, (4,), meshes, shape)
    for number, pair in enumerate(pairs_across(meshes, shape)):
        for one in ranks:
            received, _, due = one[number]
            assert received == due, pair
        assert sum(one[number][1] for one in ranks) == sum(one[number][0] for one in ranks)


UNUSED = START + """
big = weft.ones(2000, 300, mesh=mesh, spec=P("dp"))
kept = [big.redistribute(placements=P(None, "tp"), async_op=True) for _ in range(3)]
if mesh.rank == mesh.size() - 1:
    time.sleep(1)
x.redistribute(placements=P(), async_op=True)
last = big.redistribute(placements=P(), async_op=True)
value = 0.0
if mesh.rank == 1:  # the others are leaving
    value = last.sum().item()
print(f"rank {mesh.rank} {value}\\n", end="", flush=True)
if "destroys" in sys.argv:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how, num_ranks", [("leaves", 4), ("destroys", 2)])
def test_a_process_may_end_with_runs_under_way(how: str, num_ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNUSED)
    done: subprocess.CompletedProcess[str] = torchrun(script, how, num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} {600000.0 if rank == 1 else 0.0}" for rank in range(num_ranks)]
    assert "Traceback" not in done.stderr


def moved_state(mesh: Any) -> list[bool]:
    """From four ranks to three, and back, in buckets of 64 bytes; two dtypes."""
    full = {"a": torch.arange(35.0).view(7, 5), "b": torch.arange(12).view(4, 3)}
    there = weft.init_mesh({"x": 3}, ranks=(3, 0, 2))
    state = {name: weft.distribute_tensor(one, mesh, P(("tp", "dp"))) for name, one in full.items()}
    moved = weft.reshard(state, there, {"a": P(None, "x"), "b": P("x")}, bucket_nbytes=64)
    back = weft.reshard(moved, state, bucket_nbytes=64)
    same = [torch.equal(one.to_local(), state[name].to_local()) for name, one in back.items()]
    return same + [
        torch.equal(one.to_local(), block(one.sharding, full[name], there.here))
        for name, one in moved.items() if there.here is not None
    ]


def test_a_state_goes_to_other_ranks_and_back(gloo: GlooWorld) -> None:
    found = gloo.run(moved_state, {"dp": 2, "tp": 2})
    assert [len(one) for one in found] == [4, 2, 4, 4] and all(map(all, found))
