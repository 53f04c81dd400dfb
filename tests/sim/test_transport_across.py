"""Transitions from one mesh to another: values, bytes, and gradients to any order."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.execute import execute
from tests.oracle import block
from tests.sim.test_transport_gradient import Side, pairing, random_part, sides, value
from tests.sim.test_transport_kinds import part_of, random_values, reduced, stacked
from tests.transitions import layouts
from weft.comm import BoundMesh, init_mesh, run_simulated
from weft.core import Layout, Mesh, P
from weft.errors import LayoutError
from weft.planner import plan
from weft.transport import Transition

MESHES = {
    "disjoint": (Mesh({"a": 2}, (0, 1)), Mesh({"a": 2}, (2, 3))),
    "overlapping": (Mesh({"a": 3}, (2, 0, 3)), Mesh({"b": 2}, (3, 1))),
    "within": (Mesh({"a": 2, "b": 2}), Mesh({"a": 2}, (3, 0))),
    "around": (Mesh({"a": 1}, (2,)), Mesh({"a": 2, "b": 2}, (1, 3, 0, 2))),
    "another order": (Mesh({"a": 4}), Mesh({"a": 2, "b": 2}, (3, 1, 2, 0))),
    "one to one": (Mesh({"a": 1}, (1,)), Mesh({"b": 1}, (2,))),
    "the same rank": (Mesh({"a": 1}, (1,)), Mesh({"b": 1}, (1,))),
}
NUM_RANKS = 5  # the last one is outside of all
WORLD = Mesh({"w": NUM_RANKS})


def parts(mesh: Mesh, ranks: list[Any]) -> list[Any]:
    """What the ranks of a mesh have, in its order."""
    return [ranks[mesh.rank_at(position)] for position in range(mesh.size())]


def run_row(src: Side, dst: Side, one: BoundMesh, other: BoundMesh) -> dict[str, Tensor]:
    """Forward, backward and double backward on one rank."""
    def mine(mesh: BoundMesh, layout: Layout, axes: Any, seed: str) -> Tensor:
        if mesh.here is None:
            return torch.empty(0, dtype=torch.float64)
        return random_part(layout, axes, mesh.here, seed)

    move = Transition(one, src.layout, dst.layout, other,
                      src_varying=src.varying, dst_varying=dst.varying)
    x = mine(one, src.layout, src.summed, "x").requires_grad_()
    y = mine(other, dst.layout, sorted(dst.varying), "y").requires_grad_()
    z = mine(one, src.layout, src.summed, "z")
    out = move(x)
    found = {"x": x.detach(), "y": y.detach(), "z": z, "out": out.detach()}
    if one.here is None and other.here is None:
        assert move.is_identity and out.shape == (0,)
        return found
    assert out.requires_grad and out.shape == y.shape
    (back,) = torch.autograd.grad(out, x, y, create_graph=True)
    (twice,) = torch.autograd.grad(back, y, z)
    assert back.shape == x.shape and twice.shape == y.shape
    return {**found, "back": back.detach(), "twice": twice, "again": move(z)}


def check_rows(one: Mesh, other: Mesh, rows: list[tuple[Side, Side]]) -> None:
    def on_rank(_: BoundMesh) -> list[dict[str, Tensor]]:
        bound = [init_mesh(mesh) for mesh in (one, other)]
        return [run_row(src, dst, *bound) for src, dst in rows]

    ranks = run_simulated(on_rank, NUM_RANKS, WORLD)
    for number, (src, dst) in enumerate(rows):
        def of(mesh: Mesh, name: str, number: int = number) -> list[Tensor]:
            return [rank[number][name] for rank in parts(mesh, ranks)]

        what = f"{src} -> {dst}"
        forward = pairing(dst, of(other, "out"), of(other, "y"))
        backward = pairing(src, of(one, "x"), of(one, "back"))
        assert torch.allclose(forward, backward), f"{what}: {forward} and {backward}"
        for once, twice in zip(value(dst, of(other, "again")), value(dst, of(other, "twice"))):
            assert torch.allclose(twice, once), f"{what}: second gradient {twice}, not {once}"


@pytest.mark.parametrize("meshes", MESHES)
@pytest.mark.parametrize("cut", [False, True])
def test_adjoint(meshes: str, cut: bool) -> None:
    one, other = MESHES[meshes]
    rows = list(itertools.product(sides(one, (5,), cut), sides(other, (5,), cut)))
    check_rows(one, other, random.Random(0).sample(rows, min(len(rows), 60)))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 2), (2, 0)], ids=str)
def test_adjoint_of_other_shapes(shape: tuple[int, ...]) -> None:
    for meshes in ("overlapping", "within"):
        one, other = MESHES[meshes]
        rows = list(itertools.product(sides(one, shape), sides(other, shape)))
        check_rows(one, other, random.Random(0).sample(rows, min(len(rows), 30)))


def terms(layout: Layout, kind: str) -> Tensor:
    values = random_values(stacked(layout), 1)
    return (values * 4).round().long() if kind == "bor" else values


@pytest.mark.parametrize("meshes", MESHES)
@pytest.mark.parametrize("kind", ["sum", "avg", "product"])
def test_kinds_against_torch(meshes: str, kind: str) -> None:
    """To every target without terms, and by way of one: value, first and second gradient."""
    one, other = MESHES[meshes]
    sources = random.Random(0).sample(pool := layouts(one, (5,), (kind,)), min(len(pool), 8))
    targets = random.Random(1).sample(pool := layouts(other, (5,), ()), min(len(pool), 5))
    rows = list(itertools.product(sources, targets))

    def on_rank(_: BoundMesh) -> list[list[Tensor]]:
        here, there = init_mesh(one), init_mesh(other)
        found = []
        for src, dst in rows:
            empty = torch.empty(0, dtype=torch.float64)
            x, z = (
                empty.clone() if here.here is None
                else part_of(src, random_values(stacked(src), seed), here.here) for seed in (1, 3)
            )
            weight = empty if there.here is None else block(dst, random_values((5,), 2), there.here)
            out = Transition(here, src, dst, there)(x.requires_grad_())
            (first,) = torch.autograd.grad((out**2 * weight).sum(), x, create_graph=True)
            if here.here is None and there.here is None:
                found.append([out.detach(), first, first])
                continue
            (second,) = torch.autograd.grad(first, x, z)
            found.append([out.detach(), first.detach(), second])
        return found

    ranks = run_simulated(on_rank, NUM_RANKS, WORLD)
    for number, (src, dst) in enumerate(rows):
        x = random_values(stacked(src), 1).requires_grad_()
        total = reduced(src, x)
        (first,) = torch.autograd.grad((total**2 * random_values((5,), 2)).sum(), x,
                                       create_graph=True)
        (second,) = torch.autograd.grad(first, x, random_values(stacked(src), 3))
        for position, mine in enumerate(parts(other, ranks)):
            due = block(dst, total.detach(), other.coordinate(position))
            assert torch.allclose(mine[number][0], due), f"{src} -> {dst}"
        for position, mine in enumerate(parts(one, ranks)):
            at = one.coordinate(position)
            for order, dense in ((1, first.detach()), (2, second)):
                assert torch.allclose(mine[number][order], part_of(src, dense, at)), (
                    f"{src} -> {dst}: gradient {order} at {at}"
                )


@pytest.mark.parametrize("kind", ["sum", "product", "max"])
def test_terms_made_and_kept(kind: str) -> None:
    """I -> P, and P -> P over axes of one name: what is reduced there is the value."""
    one, other = Mesh({"a": 2, "b": 2}), Mesh({"a": 2, "c": 2}, (3, 4, 0, 1))
    sources = [Layout(one, (5,), P("b")), Layout(one, (5,), P("b", partial={"a": kind}))]
    targets = [Layout(other, (5,), P("c", partial={"a": kind})),
               Layout(other, (5,), P(partial={"a": kind, "c": kind}))]
    sources = sources[: 1 if kind == "max" else 2]
    rows = [(src, dst) for src, dst in itertools.product(sources, targets)]

    def on_rank(_: BoundMesh) -> list[list[Tensor]]:
        here, there = init_mesh(one), init_mesh(other)
        found = []
        for src, dst in rows:
            full = Layout(other, (5,))
            x = torch.empty(0, dtype=torch.float64)
            if here.here is not None:
                x = part_of(src, random_values(stacked(src), 1), here.here)
            x.requires_grad_()
            term = Transition(here, src, dst, there)(x)
            if kind == "max":
                with torch.no_grad():
                    found.append([Transition(there, dst, full)(term), term.detach()])
                continue
            out = Transition(there, dst, full)(term)
            (grad,) = torch.autograd.grad(out.sum(), x)
            found.append([out.detach(), grad])
        return found

    ranks = run_simulated(on_rank, NUM_RANKS, WORLD)
    for number, (src, dst) in enumerate(rows):
        x = random_values(stacked(src), 1).requires_grad_()
        total = reduced(src, x)
        (first,) = torch.autograd.grad(total.sum(), x)
        for mine in parts(other, ranks):
            assert torch.allclose(mine[number][0], total.detach()), f"{src} -> {dst}"
        for position, mine in enumerate(parts(one, ranks) if kind != "max" else ()):
            due = part_of(src, first, one.coordinate(position))
            assert torch.allclose(mine[number][1], due), f"{src} -> {dst}: gradient"


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("meshes", MESHES)
def test_values_and_bytes(meshes: str, pieces: bool) -> None:
    """Exactly the missing bytes; ranks outside both take part in nothing."""
    one, other = MESHES[meshes]
    full = torch.arange(15).view(5, 3)
    pairs = list(itertools.product(layouts(one, (5, 3), ()), layouts(other, (5, 3), ())))
    plans = [plan(src, dst, 8) for src, dst in random.Random(0).sample(pairs, min(len(pairs), 80))]

    def on_rank(_: BoundMesh) -> list[Tensor]:
        here, there = init_mesh(one), init_mesh(other)
        if pieces and (here.here or there.here) is not None:
            here.world.across(here, there).swaps_from_nbytes = 0
        found = []
        for it in plans:
            x = torch.empty(0, dtype=torch.int64)
            if here.here is not None:
                x = block(it.src, full, here.here)
            found.append(execute(it, x, here, there))
        return found

    ranks = run_simulated(on_rank, NUM_RANKS, WORLD)
    for number, it in enumerate(plans):
        for position, mine in enumerate(parts(other, ranks)):
            due = block(it.dst, full, other.coordinate(position))
            assert torch.equal(mine[number], due), f"{it}\n{mine[number]}"
            rank = other.rank_at(position)
            held = one.position_of_rank(rank)
            has = [] if held is None else block(it.src, full, one.coordinate(held)).flatten()
            missing = sum(int(element) not in set(map(int, has)) for element in due.flatten())
            assert 8 * missing == it.bytes_received(rank), str(it)
        for rank in range(NUM_RANKS):
            if other.position_of_rank(rank) is None:
                assert ranks[rank][number].shape == (0,)


def test_what_the_table_lacks_is_refused_on_all_ranks() -> None:
    one, other = MESHES["overlapping"]
    src, dst = Layout(one, (5,)), Layout(other, (5,), P(partial={"b": "avg"}))

    def on_rank(_: BoundMesh) -> str:
        with pytest.raises(LayoutError) as caught:
            Transition(init_mesh(one), src, dst, init_mesh(other))
        return str(caught.value)

    said = run_simulated(on_rank, NUM_RANKS, WORLD)
    assert said == [said[0]] * NUM_RANKS
