"""Every pair of small layouts, carried out: each rank's part is cut from the dense value."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.effort import drawn
from tests.execute import execute
from tests.naive import naive
from tests.oracle import block, coordinates, reduce_partials
from tests.transitions import MESHES, SHAPES, layouts
from weft.comm import BoundMesh, run_simulated
from weft.core import Layout, Mesh, P
from weft.planner import Plan, plan

Make = Callable[[Sequence[int]], Tensor]


def integers(shape: Sequence[int]) -> Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.int64).view(tuple(shape))


def terms_of(layout: Layout, make: Make) -> Tensor:
    """One full-size term for each coordinate of the partial axes, stacked by those digits."""
    partial = zip(layout.mesh.axis_sizes, layout.partial)
    return make((*(size for size, kind in partial if kind), *layout.shape))


def held(layout: Layout, terms: Tensor, at: Sequence[int]) -> Tensor:
    """What the rank at a coordinate holds of stacked terms."""
    digits = tuple(digit for digit, kind in zip(at, layout.partial) if kind)
    return block(layout, terms[digits], at).contiguous()


def value_of(layout: Layout, terms: Tensor) -> Tensor:
    """The value of terms that are stacked by the digits of the partial axes."""
    count = sum(kind is not None for kind in layout.partial)
    return reduced(layout, terms.flatten(0, count - 1)) if count else terms


def reduced(layout: Layout, terms: Tensor) -> Tensor:
    """The value of terms that are stacked in dim 0."""
    if "bxor" in layout.partial:
        return torch.stack([(terms >> bit & 1).sum(0) % 2 << bit for bit in range(8)]).sum(0)
    if set(layout.partial) & {"band", "bor"}:  # of bools
        return terms.all(0) if "band" in layout.partial else terms.any(0)
    return reduce_partials(layout, terms)


def by_pieces(bound: BoundMesh) -> None:
    """From now on groups of this mesh move few bytes as they move many."""
    for count in range(1, bound.ndim + 1):
        for axes in itertools.combinations(range(bound.ndim), count):
            bound.comm(axes).swaps_from_nbytes = 0


def carry_out(
    plans: Sequence[Plan], make: Make, mesh: Mesh, pieces: bool = False
) -> list[list[Tensor]]:
    """Per rank, the local results of all plans."""
    def fn(bound: BoundMesh) -> list[Tensor]:
        assert bound.here is not None
        if pieces:
            by_pieces(bound)
        return [
            execute(found, held(found.src, terms_of(found.src, make), bound.here), bound)
            for found in plans
        ]

    return run_simulated(fn, mesh.size(), mesh)


def judge(found: Plan, make: Make, parts: Sequence[Tensor]) -> None:
    """Each rank's part, terms reduced over the target's partial axes, against the dense value."""
    value, dst = value_of(found.src, terms_of(found.src, make)), found.dst
    places = coordinates(dst)
    for here, mine in zip(places, parts):
        peers = [
            other for at, other in zip(places, parts)
            if all(kind or a == b for kind, a, b in zip(dst.partial, here, at))
        ]
        got = reduced(dst, torch.stack(peers)) if dst.is_partial else mine
        assert mine.is_contiguous() and mine.dtype == value.dtype, str(found)
        assert torch.equal(got, block(dst, value, here)), f"{found}\nat {here}: {mine}"


def check(plans: Sequence[Plan], make: Make, mesh: Mesh, pieces: bool = False) -> None:
    ranks = carry_out(plans, make, mesh, pieces)
    for number, found in enumerate(plans):
        judge(found, make, [parts[number] for parts in ranks])


MANY = 500
"""Of more pairs than these a share is tried; tests/pure tries others of their plans, on symbols."""


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_pair(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh = Mesh(sizes)
    pairs = list(itertools.product(layouts(mesh, shape), repeat=2))
    if len(pairs) > MANY:
        pairs = drawn(pairs)
    check([plan(src, dst) for src, dst in pairs], integers, mesh)


@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
@pytest.mark.parametrize("shape", [(), (4,), (5,), (3, 4), (2, 0)])
def test_every_pair_piece_by_piece(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh = Mesh(sizes)
    pairs = list(itertools.product(layouts(mesh, shape), repeat=2))
    sample = random.Random(0).sample(pairs, min(len(pairs), 300))
    check([plan(src, dst) for src, dst in sample], integers, mesh, pieces=True)


@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
def test_every_naive_pair(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(sizes)
    pairs = drawn(list(itertools.product(layouts(mesh, (3, 2)), repeat=2)))
    check([naive(src, dst) for src, dst in pairs], integers, mesh)


def bools(shape: Sequence[int]) -> Tensor:
    return integers(shape) % 3 > 0


def signs(shape: Sequence[int]) -> Tensor:
    return (integers(shape) * 7 % 5 - 2).double()


KINDS = {
    "max": signs, "min": signs, "product": signs, "and": bools, "or": bools, "band": bools,
    "bor": bools,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str) -> None:
    mesh = Mesh((2, 2))
    pairs = [
        (src, dst) for src, dst in itertools.product(layouts(mesh, (3, 2), (kind,)), repeat=2)
        if not any(after and isinstance(src.on(axis), int)
                   for axis, after in enumerate(dst.partial))
    ]
    check([plan(src, dst) for src, dst in drawn(pairs)], KINDS[kind], mesh)


@pytest.mark.parametrize("kinds", [("avg",), ("avg", "sum")])
def test_means_stand_with_sums(kinds: tuple[str, ...]) -> None:
    mesh = Mesh((2, 2))
    sources, targets = layouts(mesh, (3, 2), kinds), layouts(mesh, (3, 2), ())
    plans = [plan(src, dst) for src in sources for dst in [src, *targets]]
    check(drawn(plans), signs, mesh)


def test_exclusive_or() -> None:
    mesh = Mesh((2, 3))
    targets = layouts(mesh, (5,), ())
    check([plan(src, dst) for src in layouts(mesh, (5,), ("bxor",)) for dst in targets],
          integers, mesh)


ROWS = [
    (P("a", "b"), P("b", "a")), (P(("a", "b")), P()), (P(partial={"a": "sum"}), P("b", "a")),
    (P("a"), P(partial={"a": "sum"})), (P(), P(None, "b")), (P("b", partial={"a": "sum"}), P()),
]
DTYPES = [
    torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.half, torch.float32,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_keep_their_values(dtype: torch.dtype) -> None:
    mesh = Mesh({"a": 2, "b": 2})
    plans = [
        plan(Layout(mesh, (5, 3), src), Layout(mesh, (5, 3), dst), dtype.itemsize)
        for src, dst in ROWS
    ]

    def make(shape: Sequence[int]) -> Tensor:
        values = integers(shape) % 7
        if dtype.is_complex:
            return values.to(dtype) * 1j
        return values.to(dtype)

    ranks = carry_out(plans, make, mesh)
    for number, found in enumerate(plans):
        src, dst = found.src, found.dst
        dense = value_of(src, terms_of(src, make)).to(dtype)
        for at, parts in zip(coordinates(dst), ranks):
            assert parts[number].dtype == dtype
            if not dst.is_partial:
                assert torch.equal(parts[number], block(dst, dense, at)), f"{found} at {at}"


def test_sums_of_integers_are_exact() -> None:
    mesh = Mesh((3,))
    src, dst = Layout(mesh, (2,), P(partial={0: "sum"})), Layout(mesh, (2,))
    big = 2**62 + 1

    def fn(bound: BoundMesh) -> Tensor:
        sign = (1, -1, 1)[bound.rank]
        return execute(plan(src, dst), torch.tensor([sign * big, 1]), bound)

    for part in run_simulated(fn, 3, mesh):
        assert part.tolist() == [big, 3]


@pytest.mark.parametrize("spec", [P("a", "b"), P(None, "a"), P(partial={"a": "sum"})])
@pytest.mark.parametrize("target", [P("b", "a"), P(), P(None, ("b", "a"))])
def test_strides_of_the_argument_do_not_matter(spec: P, target: P) -> None:
    mesh = Mesh({"a": 2, "b": 2})
    src, dst = Layout(mesh, (5, 3), spec), Layout(mesh, (5, 3), target)
    terms = terms_of(src, integers)

    def fn(bound: BoundMesh) -> Tensor:
        assert bound.here is not None
        mine = held(src, terms, bound.here)
        wide = torch.zeros(*mine.shape, 2, dtype=mine.dtype)
        wide[..., 0] = mine
        strided = wide[..., 0].t().clone().t() if bound.rank % 2 else wide[..., 0]
        return execute(plan(src, dst), strided, bound)

    judge(plan(src, dst), integers, run_simulated(fn, 4, mesh))


def test_a_one_dimensional_argument_with_a_step() -> None:
    mesh = Mesh((2,))
    src, dst = Layout(mesh, (4,), P(0)), Layout(mesh, (4,), P())
    run = plan(src, dst)
    parts = run_simulated(
        lambda bound: execute(run, torch.arange(4)[::2] + 10 * bound.rank, bound), 2, mesh
    )
    assert [part.tolist() for part in parts] == [[0, 2, 10, 12]] * 2


def test_copy_never_shares_memory() -> None:
    mesh = Mesh((2,))
    whole, cut = Layout(mesh, (4, 2)), Layout(mesh, (4, 2), P(0))

    def fn(bound: BoundMesh) -> None:
        x = torch.ones(4, 2)
        for target in (whole, cut):
            shared = execute(plan(whole, target), x, bound)
            assert shared.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            apart = execute(plan(whole, target), x, bound, copy=True)
            apart.zero_()
            assert apart.is_contiguous() and torch.equal(x, torch.ones(4, 2))

    run_simulated(fn, 2, mesh)


def test_a_rank_outside_the_mesh_keeps_its_empty_part() -> None:
    mesh = Mesh({"a": 2}, ranks=(2, 0))
    run = plan(Layout(mesh, (3,), P("a")), Layout(mesh, (3,)))

    def fn(bound: BoundMesh) -> Tensor:
        mine = {0: torch.tensor([3.0]), 1: torch.empty(0), 2: torch.tensor([1.0, 2.0])}
        return execute(run, mine[bound.rank], bound)

    parts = run_simulated(fn, 3, mesh)
    assert [part.tolist() for part in parts] == [[1, 2, 3], [], [1, 2, 3]]
