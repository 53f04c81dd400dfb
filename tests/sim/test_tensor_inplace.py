"""In-place ops one by one, windows, and writes that nothing tells of; as on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import weft
from tests.harness import ranks
from tests.sharded import Make, agree, in_ways
from weft import P
from weft.core import Layout, Mesh

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8
W = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)

ALONE = """
    neg abs exp sqrt tanh sigmoid floor ceil round trunc frac reciprocal rsqrt log log1p log2
    log10 sin cos tan sinh cosh asinh atan erf erfc square sign relu nan_to_num deg2rad rad2deg
    lgamma digamma exp2 expm1 sgn sinc i0 logical_not triu tril
"""
WITH: dict[str, Callable[[Tensor, Tensor, Make], Any]] = {
    "cumsum": lambda x, a, make: x.cumsum_(0), "cumprod": lambda x, a, make: x.cumprod_(1),
    "renorm": lambda x, a, make: x.renorm_(2, 0, 1.0),
    "addcmul": lambda x, a, make: x.addcmul_(a, a, value=2),
    "addcdiv": lambda x, a, make: x.addcdiv_(a, a + 1), "lerp": lambda x, a, make: x.lerp_(a, 0.3),
    "fmod": lambda x, a, make: x.fmod_(0.7), "remainder": lambda x, a, make: x.remainder_(a),
    "clamp": lambda x, a, make: x.clamp_(1, 2), "clamp_max": lambda x, a, make: x.clamp_max_(a),
    "hypot": lambda x, a, make: x.hypot_(a), "atan2": lambda x, a, make: x.atan2_(a),
    "xlogy": lambda x, a, make: x.xlogy_(a), "copysign": lambda x, a, make: x.copysign_(-1),
    "eq": lambda x, a, make: x.eq_(a), "lt": lambda x, a, make: x.lt_(2),
    "fill_diagonal": lambda x, a, make: x.fill_diagonal_(7.0),
    "index_fill": lambda x, a, make: x.index_fill_(0, torch.tensor([1, 3]), 5.0),
    "masked_fill": lambda x, a, make: x.masked_fill_(a > 2, 0.0),
    "heaviside": lambda x, a, make: x.heaviside_(a),
    "nextafter": lambda x, a, make: x.nextafter_(a),
    "floor_divide": lambda x, a, make: x.floor_divide_(2),
    "polygamma": lambda x, a, make: x.polygamma_(1),
    "mvlgamma": lambda x, a, make: x.mvlgamma_(1),
    "ldexp": lambda x, a, make: x.ldexp_(torch.tensor(2)),
    "float_power": lambda x, a, make: x.float_power_(2),
    "addmm": lambda x, a, make: x.addmm_(
        make(X[:, :2].contiguous(), False), make(X[:2], False), beta=0.5
    ),
    "addr": lambda x, a, make: x.addr_(make(X[:, 0], False), make(X[0], False), alpha=2),
}


def every_op(make: Make) -> Any:
    seen = []
    for name in ALONE.split():
        seen.append(getattr(make(X, False), f"{name}_")())
    for name, write in WITH.items():
        x = make(X, False)
        assert write(x, make(X + 1, False), make) is x, name
        seen.append(x)
    return seen


def operators(make: Make) -> Any:
    m, n = make(X > 2, False), make(X > 1, False)
    m |= n
    m &= ~make(X > 3, False)
    m ^= n
    k = make(torch.arange(30).view(5, 6), False)
    k <<= 1
    k |= 1
    k >>= 1
    k //= 2
    k %= 5
    k **= 2
    return [m, k]


def windows(make: Make) -> Any:
    """They overlap: read, with gradients, after writes to the base; those that do not, written."""
    x = make(X)
    rows, columns, apart = x.unfold(0, 3, 1), x.unfold(1, 4, 1), x.unfold(1, 2, 3)
    ((rows * rows).sum() + columns.exp().sum() + apart.sum()).backward()
    y = make(X, False)
    rows, columns = y.unfold(0, 3, 1), y.unfold(1, 4, 1)
    y.mul_(2)
    seen = [rows * 1, columns * 1]
    y.unfold(0, 2, 2).mul_(2)
    y.unfold(1, 2, 2).add_(1)
    return [x.grad, *seen, y, rows, columns]


def rows_that_share_memory(make: Make) -> Any:
    """A row of an expanded tensor is all of its rows."""
    x = make(X[:1])
    y = x * 1
    rows = y.expand(4, 6)
    rows[2].mul_(x.detach()[0])
    rows[0, 1:4].add_(1)
    y[0, 5] = 7
    rows.select(0, 3).neg_()
    (rows * rows).sum().backward()
    z = make(X[:1], False)
    same = z.expand(3, 6)
    same[1:2].exp_()
    same[:1] = z + 1
    return [x.grad, y, rows, z, same]


def a_chain(make: Make) -> Any:
    x = make(X)
    y = x * 1
    y.add_(1).mul_(2).clamp_(max=100).sub_(x).div_(2)
    y.sum().backward()
    return [y, x.grad]


PROGRAMS = [every_op, operators, windows, rows_that_share_memory, a_chain]


@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
@pytest.mark.parametrize("program, way", in_ways(PROGRAMS))
def test_as_plain_tensors(program: Any, way: str) -> None:
    agree(program, way)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(partial={"x": "sum"})], ids=str)
def test_what_was_moved_for_a_use_is_a_value(spec: P) -> None:
    """A write through `.data` after the forward, which torch does not count, changes what torch
    has saved of a plain tensor, and so its gradient. What was gathered or reduced for the use stays
    what it was, and the gradient is that of the forward."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    (x @ w).tanh().sum().backward()

    def on_rank(mesh: Any) -> list[Tensor]:
        x = weft.distribute_tensor(X, mesh, P()).requires_grad_()
        w = weft.distribute_tensor(W, mesh, spec).requires_grad_()
        loss = (x @ w.redistribute(placements=P())).tanh().sum()
        w.data.zero_()
        loss.backward()
        return [x.grad.full_tensor(), w.grad.full_tensor(), w.detach().full_tensor()]

    for of_x, of_w, now in weft.testing.run(on_rank, mesh={"x": 2}):
        torch.testing.assert_close(of_x, x.grad)
        torch.testing.assert_close(of_w, w.grad)
        assert not now.any()


TERMS = {"max": X - 1, "min": X - 1, "product": X, "or": X > 2, "and": X > 2,
         "band": X.long(), "bor": X.long()}

NOT_LINEAR: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "op": lambda x, other: x.logical_not_(),
    "copy_": lambda x, other: x.copy_(other),
    "a block": lambda x, other: x.__setitem__((slice(1, 4), 2), other[1:4, 3]),
    "a mask": lambda x, other: x.__setitem__(other > 3, 0),
    "a mask of its own": lambda x, other: x.__setitem__((x > 0).clone(), x[x > 0]),
    "places": lambda x, other: x.__setitem__(torch.tensor([0, 4]), other[:2]),
}


@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("axes", [{"x": 2}, {"y": 2, "x": 2}], ids=str)
def test_terms_of_every_kind_are_written_to(kind: str, axes: dict[str, int]) -> None:
    """They are reduced for what is not linear, and are terms again afterwards."""
    def on_rank(mesh: Any) -> None:
        rest = ["y"] if "y" in axes else []
        for full in (TERMS[kind], TERMS[kind][:, :5]):  # of new lengths, too
            for program in NOT_LINEAR.values():
                for spec in (P("x"), P()):
                    other = weft.distribute_tensor(X[:, : full.shape[1]].to(full.dtype), mesh, spec)
                    x = weft.distribute_tensor(full, mesh, P(None, *rest)).redistribute(
                        placements=P(None, *rest, partial={"x": kind}))
                    expected, layout = full.clone(), x.sharding
                    program(expected, X[:, : full.shape[1]].to(full.dtype))
                    program(x, other)
                    assert x.sharding == layout
                    assert torch.equal(x.full_tensor(), expected)

    weft.testing.run(on_rank, mesh=axes)


@pytest.mark.parametrize("kind", ["avg", "bxor"])
def test_terms_that_no_value_becomes_are_not_written_to(kind: str) -> None:
    def on_rank(mesh: Any) -> str:
        full = X if kind == "avg" else X.long()
        x = weft.ShardTensor.from_local(full, mesh, P(partial={"x": kind}))
        with weft.explain() as log, pytest.raises(weft.UnsupportedOpError) as caught:
            x.clamp_(0, 1)
        assert not log.events
        return str(caught.value)

    (text, _) = weft.testing.run(on_rank, mesh={"x": 2})
    assert text == (
        f"aten.clamp_.default: it writes to [5, 6] partial({kind}@x), and its result is [5@x, 6].\n"
        "  Rule: a whole value becomes partial by and, band, bor, max, min, or, product, sum; what "
        "is not linear in partial values of other kinds cannot be written to them.\n"
        f"  Offenders: {kind} on axis 'x'\n"
        "  Fix: x = x.redistribute(placements=P()) before"
    )


@pytest.mark.parametrize("write", [
    lambda x, value: x.add_(value), lambda x, value: x[1].sub_(value[0]),
    lambda x, value: x.copy_(value),
])
def test_terms_without_a_gradient_take_no_values_that_have_one(write: Any) -> None:
    def on_rank(mesh: Any) -> str:
        x = weft.ShardTensor.from_local(X, mesh, P(partial={"x": "max"}))
        with weft.explain() as log, pytest.raises(weft.UnsupportedOpError) as caught:
            write(x, X.clone().requires_grad_())
        assert not log.events and not x.requires_grad
        write(x, X)
        return str(caught.value)

    (text, _) = weft.testing.run(on_rank, mesh={"x": 2})
    assert text.split("\n", 1)[1] == (
        "  Rule: P(max) and P(min) carry no gradient.\n"
        "  Offenders: partial max\n"
        "  Fix: x = x.redistribute(placements=P()) before, or value.detach()"
    )


@pytest.mark.parametrize("function", [
    torch.fft.irfft, lambda x: torch.channel_shuffle(x.real, 2)], ids=["irfft", "channel_shuffle"])
def test_results_without_elements_share_no_memory_with_a_view(
    function: Callable[[Tensor], Tensor]
) -> None:
    """Else a rank that has none would write to the base what the others do not."""
    def on_rank(mesh: Any) -> Tensor:
        layout = Layout(Mesh({"x": 3}), (70,), P("x"), sizes={0: (26, 5, 39)})
        lines = weft.distribute_tensor(full, mesh, layout).view(5, 2, 7)
        return function(lines).add_(1).full_tensor()

    full = torch.arange(70).to(torch.complex128)
    expected = function(full.view(5, 2, 7)).add_(1)
    for found in weft.testing.run(on_rank, mesh={"x": 3}):
        torch.testing.assert_close(found, expected)


BLOCKS: dict[str, Any] = {
    "a column": (slice(None), 3), "a column as one": (slice(None), slice(3, 4)),
    "columns": (slice(1, None), slice(2, 4)), "a last number": (..., -1),
    "a new dim": (slice(None), None, 3), "steps": (slice(None), slice(None, None, 7)), "a row": 2,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_shards_of_one_row(name: str) -> None:
    """`x[:, 3] += 1` sets, after it has added, what lies there already: with other strides."""
    def add(x: Tensor, index: Any = BLOCKS[name]) -> None:
        x[index] += 1
        x[index] = x[index]

    def on_rank(mesh: Any) -> None:
        for spec in (P("x"), P(None, "x"), P()):
            x, expected = weft.distribute_tensor(X, mesh, spec), X.clone()
            with weft.explain() as log:
                add(x)
            add(expected)
            assert not log.events
            assert torch.equal(x.full_tensor(), expected)

    weft.testing.run(on_rank, mesh={"x": 5})


@pytest.mark.parametrize("spec", [P("a", "b"), P(None, "a"), P("b")], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (1, 3), (0, 3)])
@ranks(a=2, b=2)
def test_a_diagonal_is_filled_where_it_lies(mesh: Any, shape: tuple[int, int], spec: P) -> None:
    for dtype, number in ((torch.float64, 2.5), (torch.int64, 7), (torch.complex64, 2.5)):
        full = torch.arange(1, shape[0] * shape[1] + 1).view(shape).to(dtype)
        x = weft.distribute_tensor(full, mesh, spec)
        layout = x.sharding
        with weft.strict():  # nothing moves
            assert x.fill_diagonal_(number) is x and x.sharding == layout
        assert torch.equal(x.full_tensor(), full.clone().fill_diagonal_(number))
    y = torch.ones(shape, dtype=torch.float64)
    x = weft.distribute_tensor(y, mesh, spec).requires_grad_()
    (x * 2).fill_diagonal_(1).sum().backward()
    assert torch.equal(x.grad.full_tensor(), (y * 2).fill_diagonal_(0))


@pytest.mark.parametrize("index", [
    slice(None), ..., slice(0, 2), (slice(None), 1), slice(1, 2), 2, slice(3, None), (2, 1),
])
def test_numbers_are_assigned_to_expanded_rows_as_in_torch(index: Any) -> None:
    """Where several elements are one in memory torch refuses, though a fill would do."""
    def assigned(x: Any) -> Any:
        rows = x.expand(3, 4)
        try:
            rows[index] = 5.0
        except RuntimeError as error:
            return str(error).split(".")[0]
        return rows

    expected = assigned(torch.arange(4.0))

    def on_rank(mesh: Any) -> None:
        for spec in (P("x"), P()):
            found = assigned(weft.distribute_tensor(torch.arange(4.0), mesh, spec))
            if isinstance(expected, str):
                assert found == expected
            else:
                torch.testing.assert_close(found.full_tensor(), expected)

    weft.testing.run(on_rank, mesh={"x": 3})


OVERLAPPING: dict[str, Callable[[Tensor], Any]] = {
    "op": lambda x: x.mul_(2),
    "copy_": lambda x: x.copy_(torch.ones(3)),
    "a draw": lambda x: x.normal_(),
    "a list": lambda x: torch._foreach_add_([x], 1.0),
    "out": lambda x: torch.add(torch.ones(4, 3), 1, out=x),
    "a column": lambda x: x.__setitem__((slice(None), 1), 2),
    "a bool": lambda x: x.__setitem__(True, 2),
    "scatter_": lambda x: x.scatter_(1, torch.zeros(1, 1, dtype=torch.int64), 2.0),
}


@pytest.mark.filterwarnings("ignore:.*so its operands were gathered.*:weft.WeftWarning")
@pytest.mark.parametrize("name", OVERLAPPING)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=str)
def test_rows_that_share_memory_are_not_written_together(name: str, spec: P) -> None:
    """torch's error on all ranks, one of which has no column; also after longer rows, of which all
    have some."""
    write = OVERLAPPING[name]
    with pytest.raises(RuntimeError) as plain:
        write(torch.ones(1, 3).expand(4, 3))

    def on_rank(mesh: Any) -> None:
        for length in (8, 3):
            x = weft.distribute_tensor(torch.ones(1, length), mesh, spec).expand(4, length)
            if length == 8 and name in ("copy_", "out"):
                continue
            with pytest.raises(RuntimeError) as told:
                write(x)
            assert str(told.value) == str(plain.value)

    weft.testing.run(on_rank, mesh={"x": 4})


READ_FIRST: dict[str, tuple[tuple[Any, Any], Callable[[Tensor, Tensor], Any]]] = {
    "columns beside": ((np.s_[:, 1:], np.s_[:, :-1]), Tensor.add_),
    "a block below": ((np.s_[1:-1, 1:-1], np.s_[2:, 1:-1]), Tensor.copy_),
    "a block above": ((np.s_[1:-1, 1:-1], np.s_[:-2, 1:-1]), lambda x, y: x.add_(y, alpha=0.5)),
    "both": ((np.s_[1:-1, 1:-1], np.s_[1:-1, :-2]), lambda x, y: x.addcmul_(y, y)),
    "a column": ((np.s_[:, 3:4], np.s_[:, 2:3]), Tensor.mul_),
    "in a list": ((np.s_[:, 1:], np.s_[:, :-1]), lambda x, y: torch._foreach_add_([x], [y])),
    "itself": ((np.s_[:, 1:3], np.s_[:, 1:3]), Tensor.mul_),
}


@pytest.mark.parametrize("name", READ_FIRST)
@pytest.mark.parametrize("shape", [(5, 6), (7, 5)])
@pytest.mark.parametrize("axes", [{"x": 3}, {"x": 4}, {"x": 2, "y": 2}], ids=str)
def test_operands_in_the_memory_of_the_target_are_read_first(
    name: str, shape: tuple[int, int], axes: dict[str, int]
) -> None:
    """On all ranks, some of which have one row, or none; again at the second call."""
    (into, of), write = READ_FIRST[name]
    full = torch.arange(1.0, 1 + shape[0] * shape[1]).view(shape).sin()
    expected = full.clone()
    for _ in range(2):
        write(expected[into], expected[of].clone())

    def on_rank(mesh: Any) -> None:
        for spec in (P("x", "y" if "y" in axes else None), P(None, "x")):
            x = weft.distribute_tensor(full, mesh, spec)
            target, other = x[into], x[of]
            for _ in range(2):
                write(target, other)
            torch.testing.assert_close(x.full_tensor(), expected)

    weft.testing.run(on_rank, mesh=axes)


@pytest.mark.parametrize("sizes", [(7, 0, 0), (0, 7, 0), None], ids=str)
@pytest.mark.parametrize("rows", [((0, 2), (1, 3)), ((0, 2), (2, 4)), ((1, 3), (1, 3))], ids=str)
def test_dense_operands_that_overlap_raise_on_all_ranks(rows: Any, sizes: Any) -> None:
    """As in torch, also where a rank has nothing of them."""
    def added(x: Any) -> Any:
        into, of = [x[slice(*one)] for one in rows]
        try:
            into.add_(of)
        except RuntimeError as error:
            return str(error)
        return x

    full = torch.arange(14.0).view(7, 2)
    expected = added(full.clone())

    def on_rank(mesh: Any) -> None:
        layout = Layout(mesh, (7, 2), P(None, "x")) if sizes is None else Layout(
            mesh, (7, 2), P("x"), sizes={0: sizes})
        found = added(weft.distribute_tensor(full, mesh, layout))
        if isinstance(expected, str):
            assert found == expected
        else:
            torch.testing.assert_close(found.full_tensor(), expected)

    weft.testing.run(on_rank, mesh={"x": 3})


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()], ids=str)
def test_a_saved_operand_in_the_memory_of_the_target_is_modified(spec: P) -> None:
    """On all ranks, whether or not it had to move or be read first: as in torch."""
    def trained(x: Any) -> None:
        rows = x.requires_grad_() * 1
        rows[:, 1:].mul_(rows[:, :-1])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            rows.sum().backward()

    trained(torch.ones(5, 4))
    weft.testing.run(
        lambda mesh: trained(weft.distribute_tensor(torch.ones(5, 4), mesh, spec)), mesh={"x": 3})
