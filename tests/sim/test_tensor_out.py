"""`out=`: targets plain and sharded, in other layouts, of other shapes and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.harness import ranks
from tests.sharded import WAYS, Make, agree
from weft import P, UnsupportedOpError

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8


def plain_targets(make: Make) -> Any:
    x = make(X, False)
    outs = [torch.zeros(5, 6).double(), torch.zeros(6, 6).double(), torch.zeros(5).double()]
    same = [torch.add(x, 1, out=outs[0]) is outs[0], torch.mm(x.mT, x, out=outs[1]) is outs[1]]
    torch.sum(x, 1, out=outs[2])
    return [outs, same]


def chained_targets(make: Make) -> Any:
    x, out = make(X, False), torch.zeros(5, 6).double()
    return [out, torch.chain_matmul(x, x.mT, x, out=out) is out]


def own_targets(make: Make) -> Any:
    x, out = make(X, False), make(X * 0, False)
    torch.mul(x, x, out=out)
    torch.add(X, out, out=out)
    torch.ops.aten.sub.out(out, x, out=out)
    return out


def empty_targets(make: Make) -> Any:
    x, out = make(X, False), torch.empty(0).double()
    torch.mm(x, x.mT, out=out)
    return out


def several_targets(make: Make) -> Any:
    x = make(X, False)
    values, indices = torch.zeros(6).double(), torch.zeros(6, dtype=torch.long)
    named = torch.max(x, 0, out=(values, indices))
    counts, borders = torch.zeros(4).double(), torch.zeros(5).double()
    torch.histogram(x, 4, out=(counts, borders), density=True)
    return [values, indices, counts, borders, named.values is values, type(named).__name__]


def lists_of_targets(make: Make) -> Any:
    x = make(X, False)
    rows = [torch.zeros(6).double() for _ in range(5)]
    parts = [torch.zeros(5, width).double() for width in (2, 4)]
    given = [torch.unbind_copy(x, out=rows),
             torch.split_with_sizes_copy(x, [2, 4], 1, out=parts)]
    return [rows, parts, [one is None for one in given]]


def other_dtypes(make: Make) -> Any:
    out = torch.zeros(5, 6)
    return torch.add(make(X, False), 1, out=out)


def integers(make: Make) -> Any:
    return torch.add(make(X, False), 1, out=torch.zeros(5, 6, dtype=torch.long))


def gradients(make: Make) -> Any:
    return torch.add(make(X), 1, out=torch.zeros(5, 6).double())


PROGRAMS = [
    plain_targets, chained_targets, own_targets, empty_targets, several_targets, lists_of_targets,
    other_dtypes, integers, gradients,
]


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_plain_tensors(program: Any, name: str) -> None:
    agree(program, name)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(), P(partial={"x": "sum"})], ids=str)
def test_a_target_among_the_operands_gets_the_true_value(spec: P) -> None:
    """Of plain tensors torch gives zeros for mm, and refuses where memory overlaps in part."""
    square = X[:, :5].contiguous()

    def on_rank(mesh: Any) -> list[torch.Tensor]:
        x, y, z = (weft.distribute_tensor(square, mesh, spec) for _ in range(3))
        torch.mm(x, x, out=x)
        torch.add(y, 1, out=y.t())
        torch.add(z[:4], 1, out=z[1:])
        plain = square.clone()
        torch.mm(plain, weft.distribute_tensor(square, mesh, spec), out=plain)
        return [x.full_tensor(), y.full_tensor(), z.full_tensor(), plain]

    due = [square @ square, (square + 1).t(), torch.cat([square[:1], square[:4] + 1])]
    for found in weft.testing.run(on_rank, mesh={"x": 2}):
        for one, wanted in zip(found, [*due, due[0]], strict=True):
            torch.testing.assert_close(one, wanted)


def test_a_target_keeps_its_layout_and_shape() -> None:
    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P("x"))
        out = weft.zeros(5, 6, dtype=X.dtype, mesh=mesh, spec=P(None, "x"))
        assert torch.mul(x, 2, out=out) is out
        with pytest.raises(UnsupportedOpError, match="a target is written to, never resized"):
            torch.sum(x, 1, out=out)
        return str(out.sharding), out.full_tensor()

    for layout, full in weft.testing.run(on_rank, mesh={"x": 2}):
        assert layout == "[5, 6@x]"
        torch.testing.assert_close(full, X * 2)


@ranks(x=2)
def test_indices_and_truth_values_have_no_gradient_to_refuse(mesh: Any) -> None:
    x = weft.ones(4, 5, mesh=mesh, spec=P("x")).requires_grad_()
    places = torch.zeros(4, dtype=torch.int64)
    torch.argmax(x, 1, out=places)
    assert places.tolist() == [0] * 4
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.add(x, 1, out=torch.empty(4, 5))


REFUSED: dict[str, Any] = {
    "a product": lambda x: torch.mm(x.mT, x, out=torch.zeros(6, 6)),
    "indices": lambda x: torch.cummax(x, 0, out=(torch.zeros_like(x), torch.zeros_like(x))),
    "values": lambda x: torch.mode(x, 0, out=(
        torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64))),
    "a copy": lambda x: torch.unbind_copy(x, out=[torch.zeros(6, dtype=torch.bool)] * 5),
    "a shape": lambda x: torch.split_copy(x, 2, out=[torch.zeros(0).double()] * 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_targets_that_torch_refuses(name: str) -> None:
    """Many kernels take targets of one dtype, to which others could be cast."""
    call = REFUSED[name]
    with pytest.raises(RuntimeError) as plain:
        call(X)

    def on_rank(mesh: Any) -> None:
        with pytest.raises(RuntimeError) as told:
            call(weft.distribute_tensor(X, mesh, P("x")))
        assert str(told.value) == str(plain.value)

    weft.testing.run(on_rank, mesh={"x": 3})
