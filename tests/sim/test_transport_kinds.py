"""Gradients of every kind of reduction, against torch's own of the stacked terms."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.effort import drawn
from tests.oracle import block, coordinates
from tests.sim.test_transport_gradient import check_rows, sides
from tests.transitions import layouts
from weft.comm import BoundMesh, run_simulated
from weft.core import Layout, Mesh, P
from weft.errors import LayoutError
from weft.planner import plan
from weft.transport import Transition


def random_values(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def stacked(layout: Layout) -> tuple[int, ...]:
    """The shape of one term per coordinate of the partial axes."""
    sizes = zip(layout.mesh.axis_sizes, layout.partial)
    return (*(size for size, kind in sizes if kind), *layout.shape)


def part_of(layout: Layout, terms: Tensor, at: Sequence[int]) -> Tensor:
    """What a coordinate holds of stacked terms."""
    digits = tuple(digit for digit, kind in zip(at, layout.partial) if kind)
    return block(layout, terms[digits], at)


def reduced(layout: Layout, terms: Tensor) -> Tensor:
    """The value of stacked terms, by differentiable torch."""
    for kind in [kind for kind in layout.partial if kind]:
        terms = {"sum": Tensor.sum, "avg": Tensor.mean, "product": Tensor.prod}[kind](terms, 0)
    return terms


def check_against_torch(
    routes: Sequence[Sequence[Layout]], mesh: Mesh, dtype: torch.dtype = torch.float64
) -> None:
    """First and second gradients through the layouts of each route, whose last is not partial.

    With the value v, weights w and z: of sum(w |v|^2), then of the real part of <gradient, z>.
    """
    def on_rank(bound: BoundMesh) -> list[tuple[Tensor, ...]]:
        at, found = bound.here, []
        assert at is not None
        for route in routes:
            src, dst = route[0], route[-1]
            x = part_of(src, random_values(stacked(src), 1, dtype), at).requires_grad_()
            weight = block(dst, random_values(dst.shape, 2), at)
            z = part_of(src, random_values(stacked(src), 3, dtype), at)
            out = x
            for one, other in itertools.pairwise(route):
                out = Transition(bound, one, other)(out)
            (first,) = torch.autograd.grad((out.abs() ** 2 * weight).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first, x, z)
            found.append((out.detach(), first.detach(), second))
        return found

    ranks = run_simulated(on_rank, mesh.size(), mesh)
    for number, route in enumerate(routes):
        src, dst = route[0], route[-1]
        x = random_values(stacked(src), 1, dtype).requires_grad_()
        value = reduced(src, x)
        weight, z = random_values(dst.shape, 2), random_values(stacked(src), 3, dtype)
        loss = (value.abs() ** 2 * weight).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x, z)
        for at, results in zip(coordinates(src), ranks):
            due = (
                block(dst, value.detach(), at), part_of(src, first.detach(), at),
                part_of(src, second, at),
            )
            for what, mine, expected in zip(("value", "first", "second"), results[number], due):
                torch.testing.assert_close(
                    mine, expected, rtol=1e-9, atol=1e-9,
                    msg=lambda text, what=what, at=at, route=route:  # type: ignore[misc]
                    f"{what} gradient at {at} of {' -> '.join(map(str, route))}: {text}",
                )


KINDS = [("sum",), ("avg",), ("sum", "avg"), ("product",)]


@pytest.mark.parametrize("kinds", KINDS, ids=" ".join)
@pytest.mark.parametrize("shape", [(3,), (3, 2)], ids=str)
def test_every_kind_to_every_target(kinds: tuple[str, ...], shape: tuple[int, ...]) -> None:
    mesh = Mesh((2, 2))
    pairs = list(itertools.product(layouts(mesh, shape, kinds), layouts(mesh, shape, ())))
    sample = random.Random(0).sample(pairs, min(len(pairs), 50))
    check_against_torch(sample, mesh)


@pytest.mark.parametrize("kinds", KINDS, ids=" ".join)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,)], ids=str)
def test_every_kind_on_three_ranks(kinds: tuple[str, ...], shape: tuple[int, ...]) -> None:
    mesh = Mesh((3,))
    pairs = itertools.product(layouts(mesh, shape, kinds), layouts(mesh, shape, ()))
    check_against_torch(list(pairs), mesh)


@pytest.mark.parametrize("kind", ["sum", "avg", "product"])
def test_complex_terms(kind: str) -> None:
    mesh = Mesh({"a": 3, "b": 2})
    src = Layout(mesh, (5,), P("b", partial={"a": kind}))
    targets = [Layout(mesh, (5,), spec) for spec in (P(), P("a"), P(("b", "a")))]
    check_against_torch([(src, dst) for dst in targets], mesh, torch.complex128)


@pytest.mark.parametrize("kind", ["sum", "avg", "product"])
@pytest.mark.parametrize("last", [P(), P("a"), P(None, ("b", "a"))], ids=str)
def test_terms_that_move_before_they_are_reduced(kind: str, last: P) -> None:
    """Other axes change while the terms stay terms; a factor's gradient is its own."""
    mesh = Mesh({"a": 3, "b": 2})
    specs = [P("b"), P(None, "b"), P()]
    kept = [Layout(mesh, (4, 3), P(*spec.entries, partial={"a": kind})) for spec in specs]
    kept.append(kept[0].replace(cuts=[(0, 0, 4), None]))
    routes = [(*pair, Layout(mesh, (4, 3), last)) for pair in itertools.permutations(kept, 2)]
    check_against_torch(routes, mesh)


def test_one_kind_that_becomes_another_goes_through_the_value() -> None:
    """P(avg) -> P(max) is P(avg) -> I -> P(max): the gradient is divided by both."""
    mesh = Mesh({"a": 3, "b": 2})
    before = ["sum", "avg", "product"]
    after = ["sum", "product", "max", "min"]
    pairs = [
        [Layout(mesh, (4,), P("b", partial={"a": kind})) for kind in (one, other)]
        for one, other in itertools.product(before, after) if one != other
    ]
    whole, weight = Layout(mesh, (4,), P("b")), random_values((4,), 2)

    def on_rank(bound: BoundMesh) -> None:
        at = bound.here
        assert at is not None
        for src, dst in pairs:
            x = part_of(src, random_values(stacked(src), 1), at).requires_grad_()
            y, seen = block(dst, weight, at), []
            for route in ([src, dst], [src, whole, dst]):
                out = x
                for one, other in itertools.pairwise(route):
                    out = Transition(bound, one, other)(out)
                (grad,) = torch.autograd.grad(out, x, y)
                # Terms may be others (a reduce-scatter and zeros cost less): their value counts.
                seen.append((Transition(bound, dst, whole)(out.detach()), grad))
            (direct, mine), (stepwise, due) = seen
            assert torch.allclose(direct, stepwise), f"{src} -> {dst}"
            assert torch.allclose(mine, due), f"{src} -> {dst}: {mine}, not {due}"

    run_simulated(on_rank, mesh.size(), mesh)


@pytest.mark.parametrize("kind", ["max", "min", "and", "or"])
def test_kinds_that_take_a_value_twice_share_every_gradient(kind: str) -> None:
    """Over two axes, while a third one moves: dy / 6; of that, the terms of what is due."""
    mesh = Mesh({"a": 3, "b": 2, "c": 2})
    dtype = torch.float64
    src = Layout(mesh, (4, 3), P("c"))
    dst = Layout(mesh, (4, 3), P(None, "c", partial={"a": kind, "b": kind}))
    full, weight, other = (random_values((4, 3), seed, dtype) for seed in range(3))

    def on_rank(bound: BoundMesh) -> Tensor:
        at = bound.here
        assert at is not None
        x = block(src, full, at).requires_grad_()
        y = block(dst, weight, at).requires_grad_()
        out = Transition(bound, src, dst)(x)
        assert torch.equal(out.detach(), block(dst, full, at))
        (first,) = torch.autograd.grad(out, x, y, create_graph=True)
        torch.testing.assert_close(first.detach(), block(src, weight, at) / 6)
        (second,) = torch.autograd.grad(first, y, block(src, other, at))
        return second

    seconds = run_simulated(on_rank, mesh.size(), mesh)
    for place in range(2):
        at = (0, 0, place)
        torch.testing.assert_close(
            torch.stack(seconds[place::2]).sum(0), block(dst, other, at) / 6
        )


# The adjoint identity, beyond the rows of test_transport_gradient.


def allowed(mesh: Mesh, shape: Sequence[int], kinds: Sequence[str], cut: bool = False) -> list:
    """The pairs of sides that the table has."""
    rows = []
    for src, dst in itertools.product(sides(mesh, shape, cut, kinds), repeat=2):
        try:
            plan(src.layout, dst.layout)
        except LayoutError:
            continue
        rows.append((src, dst))
    return rows


@pytest.mark.parametrize("cut", [False, True])
def test_adjoint_of_means_beside_sums(cut: bool) -> None:
    mesh = Mesh((2, 2))
    check_rows(mesh, drawn(allowed(mesh, (3,), ("sum", "avg", "R"), cut)))


@pytest.mark.parametrize("cut", [False, True])
def test_adjoint_on_unequal_axes(cut: bool) -> None:
    mesh = Mesh((2, 3))
    check_rows(mesh, drawn(allowed(mesh, (7,), ("sum", "R"), cut)))


@pytest.mark.parametrize("cut", [False, True])
def test_adjoint_on_three_axes(cut: bool) -> None:
    mesh = Mesh((2, 2, 2))
    rows = list(itertools.product(sides(mesh, (5, 3), cut), repeat=2))
    check_rows(mesh, random.Random(1).sample(rows, 80))
