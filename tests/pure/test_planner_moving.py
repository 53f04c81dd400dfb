"""States planned together: each element arrives once, senders share the work, buckets hold."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from bench.reshard import cases
from weft.core import Layout, Mesh, P
from weft.planner.moving import Move, Moving, moving, piece_of

MESHES = [
    Mesh({"a": 2, "b": 3}), Mesh({"a": 6}, (6, 3, 0, 8, 2, 7)),
    Mesh({"x": 2, "y": 2}, (9, 8, 1, 2)), Mesh({"x": 1}, (5,)),
    Mesh({"a": 3, "b": 2}, range(4, 10)),
]


def some_layout(mesh: Mesh, shape: tuple[int, ...], rng: random.Random) -> Layout:
    dims: list[list[Any]] = [[] for _ in shape]
    for axis in mesh.axis_names:
        at = rng.randrange(len(shape) + 1)
        if at < len(shape):
            dims[at].insert(rng.randrange(len(dims[at]) + 1), axis)
    return Layout(mesh, shape, P(*(tuple(axes) for axes in dims)))


def some_moves(seed: int) -> list[Move]:
    rng = random.Random(seed)
    out = []
    for _ in range(6):
        shape = tuple(rng.randrange(8) for _ in range(rng.randrange(1, 4)))
        src, dst = (some_layout(rng.choice(MESHES), shape, rng) for _ in range(2))
        out.append(Move(src, dst, rng.choice(["float32", "bfloat16"])))
    return out


def elements(box: Any) -> set[tuple[int, ...]]:
    return set(product(*(range(*one) for one in box)))


def held(layout: Layout, rank: int) -> set[tuple[int, ...]]:
    at = layout.mesh.position_of_rank(rank)
    return set() if at is None else elements(layout.box_at(layout.mesh.coordinate(at)))


@pytest.mark.parametrize("seed", range(30))
def test_each_rank_gets_what_it_lacks_once(seed: int) -> None:
    plan = moving(some_moves(seed), bucket_nbytes=64, node_size=4)
    for tensor, (move, route) in enumerate(zip(plan.moves, plan.routes)):
        counts = {num for bucket in plan.buckets for at, _, num in bucket if at == tensor}
        numbers = [number for bucket in plan.buckets for at, number, _ in bucket if at == tensor]
        count = max(counts, default=0)
        assert numbers == list(range(count)) and len(counts) <= 1
        for rank in range(10):
            got: list[tuple[int, ...]] = []
            for holder, box in route.receives(rank):
                pieces = [one for number in range(count)
                          for one in elements(piece_of(box, number, count))]
                got += pieces
                assert set(pieces) <= held(move.src, holder)
                assert (rank, box) in route.sends(holder)
            kept = route.keeps(rank)
            assert (elements(kept) if kept else set()) == (
                held(move.src, rank) & held(move.dst, rank))
            assert sorted(got) == sorted(held(move.dst, rank) - held(move.src, rank))
            for taker, box in route.sends(rank):
                assert (rank, box) in route.receives(taker)


@pytest.mark.parametrize("seed", range(30))
def test_no_bucket_is_exceeded(seed: int) -> None:
    """Except by a part that has no more rows to be cut."""
    limit = 80
    plan = moving(some_moves(seed), bucket_nbytes=limit)
    sizes = {"float32": 4, "bfloat16": 2}
    total = dict.fromkeys(range(10), 0)
    for bucket in plan.buckets:
        assert len({plan.moves[tensor].dtype for tensor, _, _ in bucket}) == 1
        for rank in range(10):
            for ends in ("sends", "receives"):
                nbytes = sum(
                    len(elements(piece_of(box, number, count))) * sizes[plan.moves[tensor].dtype]
                    for tensor, number, count in bucket
                    for _, box in getattr(plan.routes[tensor], ends)(rank))
                assert nbytes <= limit or len(bucket) == 1
                total[rank] += nbytes * (ends == "receives")
    assert total == {rank: plan.bytes_received.get(rank, 0) for rank in total}
    assert sum(total.values()) == plan.lower_bound


def busiest(plan: Moving) -> float:
    """What the busiest sender sends, over the mean of those that hold something."""
    holders = {rank for move in plan.moves for rank in range(100)
               if move.src.mesh.position_of_rank(rank) is not None}
    return max(plan.bytes_sent.values()) * len(holders) / sum(plan.bytes_sent.values())


@pytest.mark.parametrize("src, dst", [
    ((Mesh({"dp": 4, "tp": 2}), P(None, "tp")), (Mesh({"tp": 3}, (8, 9, 10)), P("tp"))),
    ((Mesh({"dp": 4, "tp": 2}), P()), (Mesh({"x": 1}, (11,)), P())),
    ((Mesh({"dp": 4, "tp": 2}), P(("dp", "tp"))), (Mesh({"a": 2, "tp": 4}), P(None, "tp"))),
    ((Mesh({"dp": 8}), P()), (Mesh({"x": 5}, range(8, 13)), P("x"))),
], ids=str)
def test_senders_share_the_work(src: Any, dst: Any) -> None:
    """Copies are more than takers, fewer, or as many: each sends its share, up to a row."""
    moves = [Move(Layout(src[0], shape, src[1]), Layout(dst[0], shape, dst[1]), "float32")
             for shape in ((800, 600), (640, 1000))]
    assert busiest(moving(moves, node_size=1)) < 1.05
    assert busiest(moving(moves)) < 1.05


def test_a_state_of_a_mixture_of_experts() -> None:
    """The bench's, with one layer: every byte once, by senders that share the work."""
    for moves in cases(32, num_layers=1).values():
        plan = moving(moves)
        assert sum(plan.bytes_received.values()) == plan.lower_bound
        assert busiest(plan) < 1.05
