"""A ShardTensor's value as numbers, arrays and text."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests.sharded import Make, agree, in_ways
from weft import P, Partial, ShardTensor
from weft.tensor.placing import left_whole
from weft.transport import traffic

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8


def numbers(make: Make) -> Any:
    x, whole = make(X, False), make(torch.arange(10))
    s, n, yes = x.sum(), whole.sum(), (x > 0).all()
    return [
        s.item(), n.item(), yes.item(), bool(yes), float(s), int(n), complex(s), bool(s),
        s.view(1, 1).item(), float(s.view(1, 1)), [10, 20, 30][whole[1]], list(range(whole[2])),
        round(float(s), 2), math.sqrt(s), f"{s:.3f}", f"{n:d}", s.tolist(),
        x.tolist(), whole.tolist(), not x.isnan().any(), max(s, x.mean()).item(),
    ]


def item_of_many(make: Make) -> Any:
    make(X).item()


def bool_of_many(make: Make) -> Any:
    bool(make(X))


def index_of_a_float(make: Make) -> Any:
    [1, 2][make(X, False).sum()]


def format_of_many(make: Make) -> Any:
    format(make(X, False), ".2f")


def arrays(make: Make) -> Any:
    x = make(X, False)
    return [
        x.numpy().tolist(), np.asarray(x).tolist(), x.numpy().dtype.name,
        np.asarray(x, dtype=np.float32).dtype.name, float(np.sum(np.asarray(x))),
        make(X).numpy(force=True).tolist(), make(X).detach().cpu().numpy().tolist(),
        x * np.float64(2), x + np.int64(1), np.stack([x, x]).shape,
    ]


def array_with_gradient(make: Make) -> Any:
    make(X).numpy()


def iteration(make: Make) -> Any:
    x = make(X)
    rows = list(x)
    sum((row * k).sum() for k, row in enumerate(x)).backward()
    a, *_, e = x.detach()
    return [rows, a, e, x.grad, [one.item() for one in make(torch.arange(4))]]


def membership(make: Make) -> Any:
    x = make(X, False)
    return [0.125 in x, 99.0 in x, torch.tensor(0.25) in x, 3 in make(torch.arange(4))]


def membership_of_text(make: Make) -> Any:
    return "a" in make(X, False)


def comparisons(make: Make) -> Any:
    x, y, z = make(X, False), make(X, False), make(X + 1, False)
    return [
        torch.equal(x, y), torch.equal(x, z), torch.equal(x, make(X[:4], False)), x.equal(y),
        torch.equal(x, X), torch.equal(X, x), torch.allclose(x, y), torch.allclose(x, z),
        x.allclose(y + 1e-9), torch.allclose(x, z, atol=2.0), torch.allclose(x, X),
        torch.equal(x / 0 * 0, x / 0 * 0), torch.allclose(x / 0 * 0, x / 0 * 0, equal_nan=True),
    ]


def close(make: Make) -> Any:
    x = make(X)
    torch.testing.assert_close(x, make(X))
    torch.testing.assert_close(x, X + 1e-12)
    torch.testing.assert_close([x], [make(X, False)])
    with pytest.raises(AssertionError, match="Mismatched elements: 30 / 30"):
        torch.testing.assert_close(x, make(X + 1))
    return 0


def control_flow(make: Make) -> Any:
    x, seen = make(X, False), []
    while x.sum() > 10:
        x = x / 2
    if (x > 0.2).any():
        seen.append("large")
    ordered = sorted([x.sum(), x.mean(), x.amax()], key=float)
    return [x, seen, [one.item() for one in ordered]]


def lists_of_tensors(make: Make) -> Any:
    """torch asks the elements for their numbers, each a collective."""
    x = make(X, False)
    s, m = x.sum(), x.mean()
    return [
        torch.tensor([s, m]), torch.tensor([[s], [m]]), torch.tensor([s, 2.0], dtype=torch.float32),
        torch.as_tensor([s, 2.0]), torch.full((2,), s), torch.arange(make(torch.arange(4)).sum()),
        torch.scalar_tensor(s), np.array([s, 2.0]).tolist(),
        torch.tensor([make(torch.arange(3)).sum()]),
    ]


def sizes(make: Make) -> Any:
    """Shapes and places given as tensors are read."""
    x, n = make(X), make(torch.arange(4)).sum()
    two = make(torch.arange(3))[2]
    return [
        x.reshape(n, 5), x.narrow(0, two, 2), x.expand(two, 5, 6), x[two:], x[:two], x.roll(n),
        x.split(n), x.sum(n - 5), x.view(-1, n - 1), x.unflatten(1, (two, 3)), x.select(0, n - 2),
    ]


@np.errstate(all="ignore")
def against_arrays(make: Make) -> Any:
    """As torch: numpy computes on the value, and torch takes the result."""
    x, y = make(X, False), X.numpy()
    return [
        x == y, y == x, x * y, x + y, x - y, x / y, x // y, x % y, x ** y, x @ y.T,
        (x != y) is True, np.exp(x), np.add(x, 1), np.greater(x, 1), np.mean(x), np.allclose(x, y),
        make(X) == y, np.float64(2) * x,
    ]


def array_times_tensor(make: Make) -> Any:
    X.numpy() * make(X, False)


def tensor_before_array(make: Make) -> Any:
    return make(X, False) < X.numpy()


def array_and_gradient(make: Make) -> Any:
    make(X) * X.numpy()


def array_without_copy(make: Make) -> Any:
    np.asarray(make(X, False), dtype=np.float32, copy=False)


def methods_of_the_class(make: Make) -> Any:
    x, whole, T = make(X), make(torch.arange(4)), torch.Tensor
    s, n = x.detach().sum(), whole.sum()
    (x * x).sum().backward()
    found = [
        T.item(s), T.__bool__(s), T.__float__(s), T.__int__(n), T.__index__(n), T.__len__(x),
        T.__complex__(s), T.tolist(whole), T.numpy(x.detach()).tolist(),
        T.__array__(whole).tolist(),
        T.__deepcopy__(x, {}), T.__contains__(x, 0.125), T.__repr__(x) == repr(x), T.dim(x),
        T.grad.__get__(x), T.is_leaf.__get__(x), T.shape.__get__(x), T.data.__get__(x),
        torch.is_nonzero(s), s.is_nonzero(), torch.is_same_size(x, X), x.is_same_size(X[0]),
    ]
    T.grad.__set__(x, None)
    T.requires_grad_(x, False)
    return [found, x.grad is None, x.requires_grad]


PROGRAMS = [
    array_times_tensor, tensor_before_array, array_and_gradient, array_without_copy, sizes,
    lists_of_tensors, against_arrays, methods_of_the_class,
    numbers, item_of_many, bool_of_many, index_of_a_float, format_of_many, arrays,
    array_with_gradient, iteration, membership, membership_of_text, comparisons, close,
    control_flow,
]


@pytest.mark.filterwarnings(
    "ignore:__array:DeprecationWarning", "ignore:numpy.*gathered:weft.WeftWarning")
@pytest.mark.parametrize("program, way", in_ways(PROGRAMS))
def test_values(program: Any, way: str) -> None:
    agree(program, way)


def test_numpy_tells_that_it_gathers() -> None:
    """Once per function; strict mode refuses it, unless the value is known."""
    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(X, mesh, P("x"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                (x + np.ones(X.shape)), np.arctan(x), np.arctan(x.redistribute(placements=P()))
        with weft.strict():
            assert (np.asarray(x) == X.numpy()).all()  # is asked for
            np.arctan(x.redistribute(placements=P()))
            with pytest.raises(weft.StrictError) as raised:
                np.arctan(x)
        return [*sorted(str(one.message).splitlines()[0] for one in caught), str(raised.value)]

    for name in ("numpy.add", "numpy.arctan"):
        left_whole._WARNED.discard(name)
    found = weft.testing.run(on_rank, 1, mesh={"x": 1})[0]
    tells = "numpy computes on the whole value, so"
    assert found[:-1] == [
        f"numpy.add: {tells} its operands were gathered, 240 bytes on every rank.",
        f"numpy.arctan: {tells} its operands were gathered, 240 bytes on every rank."]
    assert found[-1] == (
        f"numpy.arctan: {tells} it would gather 240 bytes on every rank.\n"
        "  Rule: under weft.strict() no op communicates implicitly.\n"
        "  Offenders: [5@x, 6]\n"
        "  Fix: torch's own: x + torch.from_numpy(array), x.exp(); x.numpy() gathers where it is "
        "meant")


def test_replicated_values_do_not_communicate() -> None:
    def on_rank(mesh: Any) -> float:
        x = weft.distribute_tensor(X, mesh, P(), src_data_rank=None)
        if mesh.rank:
            return 0.0
        assert x.tolist() == X.tolist() and bool((x > 0).all()) and (x.numpy() == X.numpy()).all()
        return x.sum().item() + float(x[0, 0])

    assert weft.testing.run(on_rank, mesh={"x": 2}) == [X.sum().item() + 0.125, 0.0]


def test_only_the_verdict_travels() -> None:
    def on_rank(mesh: Any) -> int:
        x = weft.distribute_tensor(torch.ones(64, 64), mesh, P("x"))
        with weft.explain() as log:
            assert torch.equal(x, x + 0) and torch.allclose(x, x * 1) and 1.0 in x
        return log.nbytes

    assert all(nbytes < 64 for nbytes in weft.testing.run(on_rank, mesh={"x": 2}))


def test_text() -> None:
    """repr shows the layout and this rank's block, and asks nobody."""
    def on_rank(mesh: Any) -> Any:
        if mesh.rank:
            return None
        x = weft.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, P("x"), src_data_rank=None)
        whole = weft.distribute_tensor(torch.arange(2), mesh, P("x"), src_data_rank=None)
        y = x.requires_grad_() * 2
        texts = repr(x), repr(whole), str(y.sum()), f"{y}", repr(weft.zeros(0, 2, mesh=mesh))
        return [text.splitlines() for text in texts]

    assert weft.testing.run(on_rank, mesh={"x": 2})[0] == [
        ["ShardTensor(f32[3@x, 2],", "  rank 0 holds [0:2, 0:2]:", "  [[0., 1.],",
         "   [2., 3.]]", "  requires_grad=True)"],
        ["ShardTensor(i64[2@x],", "  rank 0 holds [0:1]:", "  [0])"],
        ["ShardTensor(f32[] partial(sum@x), rank 0's partial value of a sum over x: 12. (item() "
         "gives the value), grad_fn=<SumBackward0>)"],
        ["ShardTensor(f32[3@x, 2],", "  rank 0 holds [0:2, 0:2]:", "  [[0., 2.],",
         "   [4., 6.]]", "  grad_fn=<MulBackward0>)"],
        ["ShardTensor(f32[0, 2],", "  rank 0 holds [0:0, 0:2]:", "  [], size=(0, 2))"],
    ]


def test_text_of_terms_and_of_known_values() -> None:
    """A term is not shown as if it were the value; after backward every rank shows the value."""
    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, P("x")).requires_grad_()
        loss = (x * 2).sum()
        before, rows = repr(loss), x.detach().sum(0, keepdim=True)
        both = ShardTensor.from_local(torch.ones(()), mesh, [Partial("avg"), Partial()])
        with traffic.record() as log:
            loss.backward()
            moved = len(log.events)
            texts = before, repr(loss), f"{loss}", str(rows), str(both), str(rows.sum().detach())
            assert len(log.events) == moved
        with torch.no_grad():
            loss += 1  # the value that was known is no more
        whole = repr(loss.detach().redistribute(P()))
        return [text.split("\n", 1)[-1].strip() for text in (*texts, repr(loss), whole)]

    def is_told(rank: int, what: str, term: float) -> str:
        return f"rank {rank}'s partial value of {what}: {term:.0f}. (item() gives the value)"

    found = weft.testing.run(on_rank, mesh={"x": 2, "y": 2})
    terms, lines = {0: (12.0, [2.0, 4.0]), 2: (18.0, [4.0, 5.0])}, ", grad_fn=<SumBackward0>)"
    scalar = "ShardTensor(f32[] partial(sum@x), "
    for rank, texts in enumerate(found):
        term, row = terms[rank // 2 * 2]
        assert texts[:2] == [
            f"{scalar}{is_told(rank, 'a sum over x', term)}{lines}",
            f"ShardTensor(30., f32[] partial(sum@x){lines}"]
        assert texts[2] == "30.0"
        assert texts[3].startswith(
            f"rank {rank}'s partial value of a sum over x, [0:1, 0:2]:\n"
            f"  [[{row[0]:.0f}., {row[1]:.0f}.]]")
        assert texts[4] == (
            "ShardTensor(f32[] partial(avg@x, sum@y), "
            f"{is_told(rank, 'a mean over x and a sum over y', 1)})")
        assert texts[5] == f"{scalar}{is_told(rank, 'a sum over x', sum(row))})"
        assert texts[6].startswith(f"{scalar}rank {rank}'s partial value of a sum over x: ")
        assert texts[7] == "ShardTensor(31., f32[])"


TAKEN_FOR_NUMBERS: dict[str, Any] = {
    "add": lambda x, t: torch.add(x, x, alpha=t),
    "add_": lambda x, t: x.clone().add_(x, alpha=t),
    "addcdiv_": lambda x, t: x.clone().addcdiv_(x, x, value=t),
    "with an operand without dims": lambda x, t: torch.addcmul(x, x, x[0, 0] * 0 + 2, value=t),
    "of integers": lambda x, t: torch.sub(x, (x[0, 0] * 8).long(), alpha=(t * 6).long()),
    "clamp": lambda x, t: x.clamp(t, 1.0),
    "of two": lambda x, t: torch.nn.functional.threshold(x, t, t * 3),
    "beta and alpha": lambda x, t: torch.addmm(x, x, x[:6].mT @ x[:6], beta=t, alpha=t * 2),
    "a norm's": lambda x, t: x.norm(t * 4, dim=1),
    "a loss's": lambda x, t: torch.nn.functional.huber_loss(x, x * 2, delta=t, reduction="none"),
}


@pytest.mark.parametrize("name", TAKEN_FOR_NUMBERS)
def test_tensors_that_torch_takes_for_numbers_are_read(name: str) -> None:
    """Only they: the others, which are cut, stay where they are."""
    function = TAKEN_FOR_NUMBERS[name]
    expected = function(X, torch.tensor(0.5, dtype=torch.float64))

    def fn(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P("dp"))
        for _ in range(2):  # by a new recipe, and by the same again
            y = function(x, (x * 0).sum() + 0.5)
            assert str(y.sharding).startswith("[5@dp") and y.dtype == expected.dtype
            torch.testing.assert_close(y.full_tensor(), expected)

    with warnings.catch_warnings():
        warnings.simplefilter("error", weft.WeftWarning)
        weft.testing.run(fn, 4, {"dp": 4})


@pytest.mark.parametrize("name", ["add", "add_", "addmm", "full_like"])
def test_a_number_that_wants_a_gradient_is_refused_as_in_torch(name: str) -> None:
    function: Callable[[Any, Any], Any] = {
        "add": lambda x, t: x.add(x, alpha=t), "add_": lambda x, t: x.add_(x, alpha=t),
        "addmm": lambda x, t: torch.addmm(x, x, x[:6].mT @ x[:6], beta=t),
        "full_like": lambda x, t: torch.full_like(x, t),
    }[name]
    with pytest.raises(TypeError) as raised:
        function(X.clone(), torch.ones((), requires_grad=True))

    def fn(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P("dp"))
        one: Any = weft.ones((), mesh=mesh).requires_grad_()
        with weft.explain() as log, pytest.raises(TypeError) as same:
            function(x, one)
        assert str(same.value) == str(raised.value)
        assert name == "addmm" or not log.events

    with warnings.catch_warnings():
        warnings.simplefilter("error", weft.WeftWarning)
        weft.testing.run(fn, 2, {"dp": 2})
