"""Collectives on local tensors: values by plain arithmetic, gradients by what the sum of all ranks'
losses says, on even, uneven and empty blocks and on axes of a larger mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.harness import ranks
from weft import LayoutError, MeshError, P, ShardTypeError, UnsupportedOpError, collectives

DTYPE = torch.float64
MESH = {"a": 2, "b": 3}
LENGTHS = (2, 0, 3, 1, 4, 2)


def block(place: int, *shape: int) -> Tensor:
    """What rank `place` brings."""
    generator = torch.Generator().manual_seed(100 + place)
    return torch.randn(shape, generator=generator, dtype=DTYPE)


def places_along(rank: int, axes: Any) -> list[int]:
    """The ranks that share this one's coordinates on all other axes, in the order of the axes."""
    here = {"a": rank // 3, "b": rank % 3}
    found = [here]
    for axis in axes if isinstance(axes, tuple) else (axes,):
        found = [{**one, axis: at} for one in found for at in range(MESH[axis])]
    return [one["a"] * 3 + one["b"] for one in found]


class Case:
    """A collective, and what it is on the blocks of all ranks of a group, in order."""

    def __init__(
        self, name: str, call: Callable[[Tensor, Any], Tensor],
        whole: Callable[[list[Tensor]], list[Tensor]], ragged: int | None = None,
    ) -> None:
        self.name, self.call, self.whole, self.ragged = name, call, whole, ragged


def shape_of(case: Case, place: int) -> tuple[int, ...]:
    shape = [6, 12]
    if case.ragged is not None:
        shape[case.ragged] = LENGTHS[place]
    return tuple(shape)


def split(x: Tensor, count: int, dim: int) -> list[Tensor]:
    """Ceiling sizes first, as torch.chunk, with empty blocks at the end."""
    step = -(-x.shape[dim] // count)
    return [
        x.narrow(dim, min(i * step, x.shape[dim]), max(0, min(step, x.shape[dim] - i * step)))
        for i in range(count)
    ]


def shifted(xs: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(xs[0]), *xs[:-1]]


CASES = [
    Case("psum", collectives.psum, lambda xs: [sum(xs)] * len(xs)),  # type: ignore[list-item]
    Case("pmean", collectives.pmean, lambda xs: [sum(xs) / len(xs)] * len(xs)),  # type: ignore
    *(
        Case(f"gather{dim}{ragged}", lambda x, axes, dim=dim: collectives.all_gather(x, axes, dim),
             lambda xs, dim=dim: [torch.cat(xs, dim)] * len(xs), ragged)
        for dim, ragged in [(0, None), (0, 0), (1, 1), (-1, None)]
    ),
    Case("gather, stacked", lambda x, axes: collectives.all_gather(x, axes, -1, tiled=False),
         lambda xs: [torch.stack(xs, -1)] * len(xs)),
    *(
        Case(f"scatter{dim}", lambda x, axes, dim=dim: collectives.reduce_scatter(x, axes, dim),
             lambda xs, dim=dim: split(sum(xs), len(xs), dim))  # type: ignore[arg-type]
        for dim in (0, 1)
    ),
    *(
        Case(f"to_all{one}{other}{ragged}",
             lambda x, axes, one=one, other=other: collectives.all_to_all(x, axes, one, other),
             lambda xs, one=one, other=other: split(torch.cat(xs, other), len(xs), one), ragged)
        for one, other, ragged in [(0, 1, None), (1, 0, None), (1, 0, 0), (0, 1, 1)]
    ),
    *(
        Case(f"ring{ragged}", lambda x, axes: collectives.ppermute(
            x, axes, [(i, (i + 1) % n) for n in [collectives.axis_size(axes)] for i in range(n)]),
             lambda xs: [xs[-1], *xs[:-1]], ragged)
        for ragged in (None, 0)
    ),
    Case("shift", lambda x, axes: collectives.ppermute(
        x, axes, [(i, i + 1) for i in range(collectives.axis_size(axes) - 1)]), shifted),
    Case("row of it", lambda x, axes: collectives.all_gather(x, axes, sizes=[
        6] * collectives.axis_size(axes)), lambda xs: [torch.cat(xs)] * len(xs)),
]


@pytest.mark.parametrize("axes", ["a", "b", ("a", "b"), ("b", "a"), 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients(case: Case, axes: Any) -> None:
    named = "b" if axes == 1 else axes

    def on_rank(mesh: Any) -> None:
        xs = [block(place, *shape_of(case, place)) for place in range(6)]
        x = xs[mesh.rank].requires_grad_()
        with mesh:
            out = case.call(x * 2, axes)
        group = places_along(mesh.rank, named)
        leaves = [block(place, *shape_of(case, place)).requires_grad_() for place in group]
        dues = case.whole([leaf * 2 for leaf in leaves])
        mine = group.index(mesh.rank)
        torch.testing.assert_close(out, dues[mine])
        # Every rank has a loss of its own; gradients are those of their sum.
        weigh = lambda place, y: (y * y * block(50 + place, *y.shape)).sum()  # noqa: E731
        weigh(mesh.rank, out).backward()
        sum(weigh(place, due) for place, due in zip(group, dues)).backward()  # type: ignore
        due = leaves[mine].grad  # None where what this rank brings goes nowhere
        torch.testing.assert_close(x.grad, torch.zeros_like(x) if due is None else due)

    weft.testing.run(on_rank, mesh=MESH)


@ranks(**MESH)
def test_second_order(mesh: Any) -> None:
    x = block(mesh.rank, 3).requires_grad_()
    with mesh:
        out = collectives.ppermute(collectives.psum(x ** 3, "a"), "b", [(0, 1), (1, 0)])
        (grad,) = torch.autograd.grad((out ** 2).sum(), x, create_graph=True)
        (grad ** 2).sum().backward()
    leaves = [block(place, 3).requires_grad_() for place in range(6)]
    sums = [sum(leaves[p] ** 3 for p in places_along(rank, "a")) for rank in range(6)]
    sent = [sums[{0: 1, 1: 0}[r % 3] + r // 3 * 3] if r % 3 < 2 else 0 * sums[r]
            for r in range(6)]
    grads = torch.autograd.grad(
        sum((one ** 2).sum() for one in sent), leaves, create_graph=True)  # type: ignore
    sum((one ** 2).sum() for one in grads).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(x.grad, leaves[mesh.rank].grad)


def test_what_moves_is_told() -> None:
    def on_rank(mesh: Any) -> list[tuple[str, str, int, str]]:
        x = block(0, 6).requires_grad_()
        with mesh, weft.explain() as log:
            y = collectives.ppermute(x, "b", [(0, 1), (1, 2)])
            collectives.all_gather(y, "a").sum().backward()
        assert all(__file__ in event.line for event in log.events)
        return [(one.op, one.collective, one.nbytes, one.direction) for one in log.events]

    told = weft.testing.run(on_rank, mesh=MESH)
    assert told[1] == [
        ("ppermute", "AllToAll", 48, "forward"), ("all_gather", "AllGather", 48, "forward"),
        ("all_gather", "ReduceScatter", 48, "backward"), ("ppermute", "AllToAll", 48, "backward"),
    ]
    assert [nbytes for _, _, nbytes, _ in told[3]] == [0, 48, 48, 48]
    assert [nbytes for _, _, nbytes, _ in told[5]] == [48, 48, 48, 0]


@ranks(**MESH)
def test_extrema_places_and_sizes(mesh: Any) -> None:
    x = block(mesh.rank, 4)
    with mesh:
        group = [block(place, 4) for place in places_along(mesh.rank, "b")]
        torch.testing.assert_close(collectives.pmax(x, "b"), torch.stack(group).amax(0))
        torch.testing.assert_close(collectives.pmin(x, "b"), torch.stack(group).amin(0))
        assert collectives.axis_index("a") == mesh.rank // 3
        assert collectives.axis_index(("b", "a")) == mesh.rank % 3 * 2 + mesh.rank // 3
        assert collectives.axis_size(("b", "a")) == 6
        flags = collectives.psum(torch.tensor([1, mesh.rank]), ("a", "b"))
        assert flags.tolist() == [6, 15]
        with pytest.raises(UnsupportedOpError, match="max"):
            collectives.pmax(x.requires_grad_(), "b")
    assert collectives.axis_size("a", mesh=mesh) == 2


@pytest.mark.parametrize(("call", "kind", "said"), [
    (lambda x: collectives.psum(x, "c"), MeshError, "psum: 'c' is no axis of Mesh"),
    (lambda x: collectives.all_gather(x, "a", 2), LayoutError, "all_gather(dim=2): x has 2 dims."),
    (lambda x: collectives.ppermute(x, "b", [(0, 3), (1, 1)]), LayoutError,
     "ppermute(perm): 1 pairs name no place of 0 to 2, 0 name a place that another pair names on "
     "the same side."),
    (lambda x: collectives.ppermute(x, "b", [(0, 1), (2, 1)]), LayoutError,
     "ppermute(perm): 0 pairs name no place of 0 to 2, 2 name a place that another pair names on "
     "the same side."),
    (lambda x: collectives.reduce_scatter(x, "b", tiled=False), LayoutError,
     "reduce_scatter(tiled=False): dim 0 has length 4, and there are 3 ranks along 'b'."),
    (lambda x: collectives.all_gather(x[:, : 1 + collectives.axis_index("b")], "b"), LayoutError,
     "all_gather(dim=0): 3 different blocks along axes ('b',)."),
    (lambda x: collectives.reduce_scatter(x, "b", sizes=(1, 1, 1)), LayoutError, "Layout"),
    (lambda x: collectives.psum(1, "a"), ShardTypeError, "psum(x): x is 1, of type int."),  # type: ignore[arg-type]
    (lambda x: collectives.all_gather(weft.zeros(4, spec=P("a")), "a", tiled=False), ShardTypeError,
     "all_gather(x): x is a ShardTensor [4@a]."),
    *((lambda _, call=call: call(weft.zeros(4, 5, spec=P("a")), "a"), ShardTypeError,
       f"{call.__name__}(x): x is a ShardTensor [4@a, 5].")
      for call in (collectives.psum, collectives.pmax, collectives.all_gather,
                   collectives.reduce_scatter)),
])
def test_bad_input(call: Any, kind: type[Exception], said: str) -> None:
    """On all ranks, with the same text along an axis, before anything is sent."""
    def on_rank(mesh: Any) -> str:
        with mesh, pytest.raises(kind) as told:
            call(torch.zeros(4, 5))
        return str(told.value)

    texts = weft.testing.run(on_rank, mesh=MESH)
    assert len(set(texts)) == 1
    assert texts[0].splitlines()[0].startswith(said)
