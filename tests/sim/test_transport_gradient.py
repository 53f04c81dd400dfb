"""Transitions are differentiable to any order: every row of the table against its adjoint.

On one axis a value is S, I, P or R (replicated, seen by a computation that varies). The dual of
S is S, of I is I, of P is R, of R is P. A pairing counts an I axis once and sums over all others.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.effort import drawn
from tests.oracle import block, coordinates
from tests.transitions import assignments, ragged
from weft.comm import BoundMesh, run_simulated
from weft.core import Layout, Mesh, P
from weft.errors import UnsupportedOpError
from weft.planner import plan
from weft.transport import Transition
from weft.transport.nodes import with_gradient


@dataclass(frozen=True, slots=True)
class Side:
    """A layout and the replicated axes on which the value is seen to vary."""

    layout: Layout
    varying: frozenset[int] = frozenset()

    @property
    def once(self) -> list[int]:
        """Axes that a pairing counts once."""
        axes = range(self.layout.mesh.ndim)
        return [a for a in axes if self.layout.on(a) is None and a not in self.varying]

    @property
    def summed(self) -> list[int]:
        return [axis for axis, kind in enumerate(self.layout.partial) if kind]


def sides(
    mesh: Mesh, shape: Sequence[int], cut: bool = False, does: Sequence[str] = ("sum", "R")
) -> list[Side]:
    """Every S, I, P, R on every axis; with `cut`, ragged cuts."""
    out = []
    for dims, kinds in assignments(mesh, len(shape), does):
        partial = [None if kind == "R" else kind for kind in kinds]
        layout = Layout.make(mesh, shape, dims, None, partial)
        if cut:
            cuts = [ragged(layout, dim) if axes else None for dim, axes in enumerate(dims)]
            layout = layout.replace(cuts=cuts)
        out.append(Side(layout, frozenset(a for a, kind in enumerate(kinds) if kind == "R")))
    return out


def random_part(layout: Layout, axes: Sequence[int], at: Sequence[int], seed: str) -> Tensor:
    """This rank's block of a random tensor that differs along `axes` (its terms)."""
    digits = tuple(at[axis] for axis in axes)
    generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, digits)).encode()))
    dense = torch.randn(layout.shape, generator=generator, dtype=torch.float64)
    return block(layout, dense, at).contiguous()


def run_row(
    src: Side, dst: Side, mesh: BoundMesh, made: dict[Any, Transition]
) -> dict[str, Tensor]:
    """Forward, backward and double backward of one transition on one rank."""
    at = mesh.here
    assert at is not None
    key = (src, dst)
    move = made.setdefault(key, Transition(
        mesh, src.layout, dst.layout, src_varying=src.varying, dst_varying=dst.varying
    ))
    x = random_part(src.layout, src.summed, at, "x").requires_grad_()
    y = random_part(dst.layout, sorted(dst.varying), at, "y").requires_grad_()
    z = random_part(src.layout, src.summed, at, "z")
    out = move(x)
    (back,) = torch.autograd.grad(out, x, y, create_graph=True)
    (twice,) = torch.autograd.grad(back, y, z)
    return {
        "x": x.detach(), "y": y.detach(), "z": z, "out": out.detach(), "back": back.detach(),
        "twice": twice, "again": move(z),
    }


def pairing(side: Side, left: list[Tensor], right: list[Tensor]) -> Tensor:
    places = coordinates(side.layout)
    return sum(
        (a * b).sum() for at, a, b in zip(places, left, right)
        if all(at[axis] == 0 for axis in side.once)
    ) + torch.zeros((), dtype=torch.float64)


def agree(layout: Layout, parts: list[Tensor], axes: Sequence[int], what: str) -> None:
    """Parts are equal along `axes`."""
    first: dict[tuple[int, ...], Tensor] = {}
    for at, part in zip(coordinates(layout), parts):
        key = tuple(digit for axis, digit in enumerate(at) if axis not in axes)
        assert torch.equal(first.setdefault(key, part), part), what


def value(side: Side, parts: list[Tensor]) -> list[Tensor]:
    """Parts with their terms summed."""
    totals: dict[tuple[int, ...], Tensor] = {}
    keys = [
        tuple(digit for axis, digit in enumerate(at) if axis not in side.summed)
        for at in coordinates(side.layout)
    ]
    for key, part in zip(keys, parts):
        totals[key] = totals[key] + part if key in totals else part
    return [totals[key] for key in keys]


def check_rows(mesh: Mesh, rows: Sequence[tuple[Side, ...]]) -> None:
    def fn(bound: BoundMesh) -> list[dict[str, Tensor]]:
        made: dict[Any, Transition] = {}
        return [run_row(src, dst, bound, made) for src, dst in rows]

    ranks = run_simulated(fn, mesh.size(), mesh)
    for number, (src, dst) in enumerate(rows):
        all_of = {name: [rank[number][name] for rank in ranks] for name in ranks[0][number]}
        what = f"{src} -> {dst}"
        forward = pairing(dst, all_of["out"], all_of["y"])
        backward = pairing(src, all_of["x"], all_of["back"])
        assert torch.allclose(forward, backward), f"{what}: {forward} and {backward}"
        replicated = [*dst.once, *dst.varying]
        agree(dst.layout, all_of["out"], replicated, f"{what}: result differs on ranks")
        agree(dst.layout, all_of["twice"], replicated, f"{what}: second gradient differs")
        agree(src.layout, all_of["back"], [*src.once, *src.summed], f"{what}: gradient differs")
        for once, twice in zip(value(dst, all_of["again"]), value(dst, all_of["twice"])):
            assert torch.allclose(twice, once), f"{what}: second gradient {twice}, not {once}"


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("cut", [False, True])
def test_adjoint_of_every_row(sizes: tuple[int, ...], cut: bool) -> None:
    mesh = Mesh(sizes)
    check_rows(mesh, list(itertools.product(sides(mesh, (3,), cut), repeat=2)))


def test_adjoint_of_every_row_in_two_dims() -> None:
    mesh = Mesh((2, 2))
    check_rows(mesh, drawn(list(itertools.product(sides(mesh, (3, 2)), repeat=2))))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0)])
def test_adjoint_without_and_with_hardly_any_elements(shape: tuple[int, ...]) -> None:
    for sizes in ((3,), (2, 2)):
        mesh = Mesh(sizes)
        rows = list(itertools.product(sides(mesh, shape), repeat=2))
        check_rows(mesh, rows if len(rows) < 100 else drawn(rows))


CUT, WHOLE, SEEN, SUM = P("a"), P(), "R", P(partial={"a": "sum"})
OWN = 2 * 8  # bytes of a quarter of 8 doubles
TABLE = [
    # from, to, bytes received forward, backward
    (CUT, WHOLE, 64 - OWN, 0),
    (CUT, SEEN, 64 - OWN, 3 * OWN),
    (WHOLE, CUT, 0, 64 - OWN),
    (SEEN, CUT, 0, 0),
    (WHOLE, SEEN, 0, 96),
    (SEEN, WHOLE, 0, 0),
    (SUM, WHOLE, 96, 0),
    (SUM, SEEN, 96, 96),
    (SUM, CUT, 3 * OWN, 64 - OWN),
    (CUT, SUM, 0, 0),
    (WHOLE, SUM, 0, 0),
    (WHOLE, P(partial={"a": "max"}), 0, 0),
]


@pytest.mark.parametrize("src, dst, forward, backward", TABLE)
def test_bytes_of_the_table(src: Any, dst: Any, forward: int, backward: int) -> None:
    mesh = Mesh({"a": 4})
    on = {side: Layout(mesh, (8,), P() if side == "R" else side) for side in (src, dst)}

    def fn(bound: BoundMesh) -> None:
        varies = frozenset({0})
        move = Transition(
            bound, on[src], on[dst], src_varying=varies if src == "R" else frozenset(),
            dst_varying=varies if dst == "R" else frozenset(),
        )
        for way, nbytes in ((move, forward), (move.reverse, backward)):
            assert plan(way.src, way.dst, 8).bytes_received(bound.rank) == nbytes
        assert move.communicates == (forward > 0)
        assert move.backward_communicates == (backward > 0)
        assert not move.is_identity

    run_simulated(fn, 4, mesh)


# Kinds.


def terms(shape: Sequence[int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def grads(loss: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient, and that of the sum of its cubes."""
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad((first**3).sum(), x)
    return first.detach(), second


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("target", [P(), P("b"), P(("b", "a"))])
def test_products_have_the_gradient_of_exclusive_products(zeros: int, target: P) -> None:
    mesh = Mesh({"a": 3, "b": 2})
    src = Layout(mesh, (5,), P("b", partial={"a": "product"}))
    dst = Layout(mesh, (5,), target)
    stacked, weight = terms((3, 5)), terms((5,), 1)
    stacked[:zeros, 1:3] = 0
    x = stacked.clone().requires_grad_()
    (first,) = torch.autograd.grad((x.prod(0) ** 2 * weight).sum(), x)

    def fn(bound: BoundMesh) -> Tensor:
        at = bound.here
        assert at is not None
        mine = block(src, stacked[at[0]], at).requires_grad_()
        out = Transition(bound, src, dst)(mine)
        torch.testing.assert_close(out, block(dst, stacked.prod(0), at))
        out.backward(2 * out.detach() * block(dst, weight, at))
        assert mine.grad is not None
        return mine.grad

    for at, part in zip(coordinates(src), run_simulated(fn, 6, mesh)):
        torch.testing.assert_close(part, block(src, first[at[0]], at))


def test_second_gradient_of_a_product() -> None:
    mesh = Mesh({"a": 3})
    src, dst = Layout(mesh, (4,), P(partial={"a": "product"})), Layout(mesh, (4,))
    stacked = terms((3, 4))
    stacked[1, 2] = 0
    x = stacked.clone().requires_grad_()
    (first,) = torch.autograd.grad(x.prod(0).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[0].sum(), x)

    def fn(bound: BoundMesh) -> tuple[Tensor, Tensor]:
        mine = stacked[bound.rank].clone().requires_grad_()
        out = Transition(bound, src, dst)(mine)
        (once,) = torch.autograd.grad(out.square().sum(), mine, create_graph=True)
        chosen = once if bound.rank == 0 else once * 0
        (twice,) = torch.autograd.grad(chosen.sum(), mine)
        return once.detach(), twice

    for rank, (once, twice) in enumerate(run_simulated(fn, 3, mesh)):
        torch.testing.assert_close(once, first[rank].detach())
        torch.testing.assert_close(twice, second[rank])


def test_a_value_becomes_a_factor_and_comes_back() -> None:
    mesh = Mesh({"a": 3, "b": 2})
    whole = Layout(mesh, (4,), P("b"))
    factors = Layout(mesh, (4,), P("b", partial={"a": "product"}))
    full, weight = terms((4,)), terms((4,), 1)

    def fn(bound: BoundMesh) -> None:
        at = bound.here
        assert at is not None
        x = block(whole, full, at).requires_grad_()
        factor = Transition(bound, whole, factors)(x)
        expected = x.detach() if at[0] == 0 else torch.ones_like(factor)
        assert torch.equal(factor.detach(), expected)
        assert Transition(bound, whole, factors).backward_communicates
        out = Transition(bound, factors, whole)(factor)
        mine = block(whole, weight, at)
        (grad,) = torch.autograd.grad(out, x, mine)
        torch.testing.assert_close(grad, mine)

    run_simulated(fn, 6, mesh)


@pytest.mark.parametrize("target", [P(), P("a"), P(partial={"b": "sum"})])
def test_means_divide_their_gradient_by_the_number_of_terms(target: P) -> None:
    mesh = Mesh({"a": 3, "b": 2})
    src, dst = Layout(mesh, (5,), P(partial={"a": "avg", "b": "sum"})), Layout(mesh, (5,), target)
    stacked, weight = terms((3, 2, 5)), terms((5,), 1)

    def fn(bound: BoundMesh) -> tuple[Tensor, Tensor]:
        at = bound.here
        assert at is not None
        mine = stacked[at].clone().requires_grad_()
        back = block(dst, weight, at).requires_grad_()
        out = Transition(bound, src, dst)(mine)
        (grad,) = torch.autograd.grad(out, mine, back, create_graph=True)
        torch.testing.assert_close(grad.detach(), weight / 3)
        (twice,) = torch.autograd.grad(grad, back, mine.detach())
        return out.detach(), twice

    ranks = run_simulated(fn, 6, mesh)
    dense = stacked.sum(1).mean(0)
    for at, (out, twice) in zip(coordinates(dst), ranks):
        if not dst.is_partial:
            torch.testing.assert_close(out, block(dst, dense, at))
            torch.testing.assert_close(twice, out)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_kinds_that_take_a_value_twice_share_its_gradient(kind: str) -> None:
    mesh = Mesh({"a": 3})
    src, dst = Layout(mesh, (2,)), Layout(mesh, (2,), P(partial={"a": kind}))

    def fn(bound: BoundMesh) -> None:
        x = torch.tensor([3.0, 6.0], requires_grad=True)
        out = Transition(bound, src, dst)(x)
        assert out.tolist() == [3, 6]
        out.backward(torch.tensor([3.0, 9.0]))
        assert x.grad is not None and x.grad.tolist() == [1, 3]

    run_simulated(fn, 3, mesh)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_a_maximum_has_no_gradient_of_its_own(kind: str) -> None:
    mesh = Mesh({"a": 2})
    src, dst = Layout(mesh, (2,), P(partial={"a": kind})), Layout(mesh, (2,))

    def fn(bound: BoundMesh) -> str:
        move = Transition(bound, src, dst)
        x = torch.tensor([float(bound.rank), 1.0], requires_grad=True)
        with torch.no_grad():
            assert move(x).tolist() == [float(kind == "max"), 1.0]
        with pytest.raises(UnsupportedOpError) as caught:
            move(x)
        return str(caught.value)

    text = run_simulated(fn, 2, mesh)[0]
    assert text == (
        f"transition P({kind})->I on a: the source [2] partial({kind}@a) is partial by {kind} "
        "and requires a gradient.\n"
        "  Rule: P(max), P(min) and the logical kinds carry no gradient; amax, max, min and "
        "the like are ops with a gradient of their own.\n"
        f"  Offenders: partial {kind}\n"
        "  Fix: x.detach() before the redistribute, or reduce by the op: x.amax(dim)"
    )


# What a call costs and shares.


def test_without_work_the_argument_comes_back() -> None:
    mesh = Mesh({"a": 2})
    whole = Layout(mesh, (2,))

    def fn(bound: BoundMesh) -> None:
        seen = Transition(bound, whole, whole, dst_varying=frozenset({0}))
        assert not seen.is_identity and not seen.communicates and seen.backward_communicates
        plain, number = torch.ones(2), torch.ones(2, dtype=torch.int64)
        assert seen(plain) is plain and seen(number) is number
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            assert seen(x) is x
        out = seen(x)
        assert out is not x and out.data_ptr() == x.data_ptr() and not out._is_view()
        assert out.requires_grad and not out.is_leaf
        assert Transition(bound, whole, whole).is_identity
        largest = Layout(mesh, (2,), P(partial={"a": "max"}))
        assert Transition(bound, largest, largest).is_identity
        assert Transition(bound, whole, whole, src_varying=frozenset({0}),
                          dst_varying=frozenset({0})).is_identity
        apart = Transition(bound, whole, whole, copy=True)
        assert not apart.is_identity
        for argument in (plain, x):
            out = apart(argument)
            assert out.data_ptr() != argument.data_ptr()
            assert out.requires_grad == argument.requires_grad

    run_simulated(fn, 2, mesh)


def test_axes_of_size_one_are_identities() -> None:
    mesh = Mesh({"a": 1, "b": 2})
    specs = [P(), P("a"), P(partial={"a": "sum"}), P(partial={"a": "max"})]

    def fn(bound: BoundMesh) -> None:
        for src, dst in itertools.product(specs[:3], specs):
            if src == P("a") and dst == specs[3]:
                continue
            assert Transition(bound, Layout(mesh, (3,), src), Layout(mesh, (3,), dst),
                              dst_varying=frozenset({0})).is_identity

    run_simulated(fn, 2, mesh)


def test_a_sliced_result_is_no_view_and_may_be_written() -> None:
    mesh = Mesh({"a": 2})
    whole, cut = Layout(mesh, (4, 3)), Layout(mesh, (4, 3), P("a"))

    def fn(bound: BoundMesh) -> None:
        x = torch.ones(4, 3, requires_grad=True)
        out = Transition(bound, whole, cut, copy=True)(x)
        out.mul_(2)
        out.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full((4, 3), 2.0))
        assert torch.equal(x.detach(), torch.ones(4, 3))

    run_simulated(fn, 2, mesh)


def test_a_rank_outside_the_mesh_runs_the_same_program() -> None:
    mesh = Mesh({"a": 2}, ranks=(2, 0))
    src, dst = Layout(mesh, (3,), P("a")), Layout(mesh, (3,))

    def fn(bound: BoundMesh) -> list[float]:
        move = Transition(bound, src, dst, dst_varying=frozenset({0}))
        size = {0: 1, 1: 0, 2: 2}[bound.rank]
        x = torch.ones(size, requires_grad=True)
        out = move(x)
        out.backward(torch.ones_like(out))
        assert x.grad is not None
        return x.grad.tolist()

    assert run_simulated(fn, 3, mesh) == [[2], [], [2, 2]]


def test_half_precision_gradients_keep_their_dtype() -> None:
    mesh = Mesh({"a": 2})
    src, dst = Layout(mesh, (3,), P("a")), Layout(mesh, (3,))

    def fn(bound: BoundMesh) -> None:
        for dtype in (torch.bfloat16, torch.half, torch.complex64):
            x = torch.ones(src.local_shape(bound.rank), dtype=dtype, requires_grad=True)
            out = Transition(bound, src, dst, dst_varying=frozenset({0}))(x)
            out.backward(torch.ones_like(out) * (bound.rank + 1))
            assert x.grad is not None and x.grad.dtype == out.dtype == dtype
            assert torch.equal(x.grad, torch.full_like(x, 3))

    run_simulated(fn, 2, mesh)


def test_a_node_of_two_functions() -> None:
    """A map and its transpose give each other as gradients; hooks see what is saved."""
    def times(x: Tensor, by: Tensor) -> Tensor:
        return with_gradient(x, torch.mul, lambda grad, by: times(grad, by), by)

    x, by, seen = torch.ones(3, requires_grad=True), torch.tensor([2.0, 3.0, 5.0]), []
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda _: by):
        out = times(x, by)
    assert len(seen) == 1 and torch.equal(seen[0], by)
    (grad,) = torch.autograd.grad(out, x, torch.ones(3, requires_grad=True), create_graph=True)
    assert torch.equal(grad, by) and grad.requires_grad
    kept = weakref.ref(x)
    del x, out, grad
    assert kept() is None
