"""Recipes are taken again only for calls that mean the same, and they stay few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.oracle import order
from tests.sharded import WAYS, Make, agree
from weft import P

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8


def flags(make: Make) -> Any:
    x, y = make(X), make(X, False)
    seen: list[Any] = []
    for _ in range(2):
        seen += [(x * 2).requires_grad, (y * 2).requires_grad]
        with torch.no_grad():
            seen.append((x * 2).requires_grad)
        y.requires_grad_()
        seen.append((y * 2).requires_grad)
        y.requires_grad_(False)
        with torch.inference_mode():
            seen.append((x * 2).is_inference())
    return seen


def default_dtypes(make: Make) -> Any:
    whole = make(torch.arange(5))
    seen = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            seen += [whole / 2, whole * 1.5, whole.float().mean(), torch.true_divide(whole, 3)]
        finally:
            torch.set_default_dtype(torch.float32)
    return [(str(one.dtype), one) for one in seen]


def autocast(make: Make) -> Any:
    x, w = make(X.float()), make(X.float().t().contiguous())
    seen = []
    for dtype in (None, torch.bfloat16, None, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            y = F.linear(x, w.t()).softmax(-1) + (x @ w)
            seen.append((str((x @ w).dtype), str(y.dtype), str((y * x[0, 0]).dtype)))
            (x @ w).float().sum().backward()
            seen.append((str(x.grad.dtype), x.grad.sum() > 0))
    return seen


def numbers_of_other_types(make: Make) -> Any:
    x, whole = make(X), make(torch.arange(1, 6))
    seen = []
    for number in (1, True, 1.0, 1 + 0j, 1):
        seen += [whole + number, x * number, torch.mul(whole, number), whole == number]
    seen += [torch.sum(x, 1), x.sum(dim=1), x.sum(True), x.sum(0), x.sum(False)]
    return [(str(one.dtype), one) for one in seen]


def arguments(make: Make) -> Any:
    x = make(X)
    seen = []
    for dim in (0, 1, -1, (0, 1)):
        for keepdim in (False, True):
            seen += [x.sum(dim, keepdim), x.mean(dim=dim, keepdim=keepdim)]
    seen += [x.sum(dtype=dtype) for dtype in (torch.float32, torch.float64, torch.int64)]
    seen += [x[k] for k in (0, 1, -1)] + [x[k : k + 2] for k in range(3)]
    seen += [torch.add(x, x, alpha=alpha) for alpha in (1, 2, 0.5)]
    return [(str(one.dtype), one) for one in seen]


FLOATS: list[tuple[str, Callable[[Any, float], Any]]] = [
    ("add", lambda x, s: x + s), ("rsub", lambda x, s: s - x), ("pow", lambda x, s: x**s),
    ("rpow", lambda x, s: s**x), ("div", lambda x, s: x / s), ("rdiv", lambda x, s: s / x),
    ("clamp", lambda x, s: x.clamp(s, 3 * s)), ("clamp min", lambda x, s: x.clamp(min=s)),
    ("leaky_relu", lambda x, s: F.leaky_relu(-x, s)), ("elu", lambda x, s: F.elu(-x, s)),
    ("where", lambda x, s: torch.where(x > s, x, s)), ("full_like", torch.full_like),
    ("add alpha", lambda x, s: torch.add(x, x, alpha=s)), ("gt", lambda x, s: x > s),
    ("addcmul", lambda x, s: torch.addcmul(x, x, x, value=s)), ("lerp", lambda x, s: x.lerp(-x, s)),
    ("softplus", lambda x, s: F.softplus(x, s)), ("fill", lambda x, s: x.clone().fill_(s)),
    ("masked_fill", lambda x, s: x.masked_fill(x > 1, s)),
    ("hardtanh", lambda x, s: F.hardtanh(x, -s, s)),
    ("mul_", lambda x, s: x.clone().mul_(s)), ("gelu of scaled", lambda x, s: F.gelu(x * s)),
    ("layer_norm", lambda x, s: F.layer_norm(x, (6,), eps=s)),
    ("rms_norm", lambda x, s: F.rms_norm(x, (6,), eps=s)),
    ("norm", lambda x, s: torch.linalg.vector_norm(x, s)),
    ("norm dim", lambda x, s: torch.linalg.vector_norm(x, s, dim=0)),
    ("old norm", lambda x, s: x.norm(s)), ("pad", lambda x, s: F.pad(x, (1, 1, 0, 2), value=s)),
    ("smoothing", lambda x, s: F.cross_entropy(x, _targets(x), label_smoothing=s / 4)),
    ("huber", lambda x, s: F.huber_loss(x, x * 0, delta=s)),
    ("smooth_l1", lambda x, s: F.smooth_l1_loss(x, x * 0, beta=s)),
    ("attention", lambda x, s: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None], scale=s)),
    ("normalize", lambda x, s: F.normalize(x, p=s)), ("addmm", lambda x, s: torch.addmm(
        x @ x.T, x, x.T, beta=s, alpha=2 * s)),
    ("nan_to_num", lambda x, s: (x + float("inf")).nan_to_num(posinf=s)),
    ("isclose", lambda x, s: torch.isclose(x, x + 1, rtol=0.0, atol=s)),
    ("foreach", lambda x, s: torch._foreach_mul([x, x], s)[1]),
]


def _targets(x: Any) -> Tensor:
    return torch.tensor([0, 1, 2, 3, 4])


@pytest.mark.parametrize("way", ["uneven", "ragged", "half partial"])
@pytest.mark.parametrize(("name", "fn"), FLOATS, ids=[name for name, _ in FLOATS])
def test_floats_are_never_stale(name: str, fn: Callable[[Any, float], Any], way: str) -> None:
    agree(lambda make: [fn(make(X, False), s) for s in (0.5, 1.5, 0.5, 2.5, 0.25)], way)


PROGRAMS = [flags, default_dtypes, autocast, numbers_of_other_types, arguments]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_keys(program: Any, way: str) -> None:
    agree(program, way)


def recipes_of(mesh: Any) -> int:
    return sum(len(meta.recipes) for meta in mesh.cache["metas"].values())


MOVED: dict[str, Callable[[Any, Any, float], Any]] = {
    "lerp_": lambda x, y, rate: x.lerp_(y, rate),
    "lerp_ by keyword": lambda x, y, rate: x.lerp_(end=y, weight=rate),
    "add_": lambda x, y, rate: x.add_(y, alpha=rate),
    "sub_": lambda x, y, rate: x.sub_(y, alpha=rate),
    "torch.sub": lambda x, y, rate: torch.sub(x, y, alpha=rate, out=x),
    "addcmul_": lambda x, y, rate: x.addcmul_(y, y, value=rate),
    "equal numbers": lambda x, y, rate: x.add_(y, alpha=rate).add_(0.5),
}
"""In-place calls whose other operand has to move: what is computed comes to the target."""


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize(
    "specs", [(P("dp"), P(None, "dp")), (P("dp"), P(partial={"dp": "sum"})), (P(), P("dp"))],
    ids=["other dim", "partial", "replicated"],
)
def test_a_rate_that_changes_moves_operands_by_one_recipe(name: str, specs: Any) -> None:
    """As a decay does that depends on the step, of Adafactor's say."""
    fn, rates = MOVED[name], [0.5, 0.0, 0.25, 0.125, -0.5, 0.0, 0.75, 0.25]
    expected = X.clone()
    for rate in rates:
        fn(expected, X, rate)

    def program(mesh: Any) -> tuple[Tensor, list[int]]:
        x, y = (weft.distribute_tensor(X.clone(), mesh, spec) for spec in specs)
        counts = []
        for rate in rates:
            fn(x, y, rate)
            counts.append(recipes_of(mesh))
        return x.full_tensor(), counts[2:]  # of zero there is a recipe of its own

    for found, counts in weft.testing.run(program, 2, {"dp": 2}):
        assert torch.equal(found, expected)
        assert len(set(counts)) == 1, counts


def test_floats_make_no_new_recipes() -> None:
    def on_rank(mesh: Any) -> bool:
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()

        def step(rate: float) -> None:
            y = (x * rate + rate - rate / 2).clamp(min=rate)
            torch.add(y, x, alpha=rate).sum().backward()
            assert x.grad is not None
            with torch.no_grad():
                x.sub_(x.grad, alpha=rate)
                x.grad.mul_(rate)

        step(0.1)
        step(0.2)
        before = recipes_of(mesh)
        for k in range(20):
            step(0.3 + k / 100)
        return recipes_of(mesh) == before

    assert weft.testing.run(on_rank, mesh={"x": 2}) == [True] * 2


def test_changing_shapes_are_right_and_bounded() -> None:
    """Also where the structure of a call is known already."""
    def on_rank(mesh: Any) -> tuple[int, int]:
        generator = torch.Generator().manual_seed(0)
        most = 0
        for k in range(120):
            rows, columns = int(torch.randint(0, 9, (), generator=generator)), k % 7
            full = torch.rand(rows, columns, generator=generator, dtype=torch.float64)
            weight = torch.rand(3, columns, generator=generator, dtype=torch.float64)
            x = weft.distribute_tensor(full, mesh, P("x"), src_data_rank=None)
            for mine, due in (
                (F.linear(x, weight), F.linear(full, weight)), (x.sum(0), full.sum(0)),
                (x.t() @ x, full.t() @ full), ((x + x[:1]).sum(1), (full + full[:1]).sum(1)),
                (x.reshape(-1), full.reshape(-1)), (x.t() * 2, full.t() * 2),
                (x.mean(1, keepdim=True) + x, full.mean(1, keepdim=True) + full),
            ):
                got = mine.full_tensor()
                assert got.shape == due.shape
                assert order(mine.stride(), due.shape) == order(due.stride(), due.shape)
                torch.testing.assert_close(got, due, equal_nan=True)
            most = max(most, len(mesh.cache["metas"]))
        return most, recipes_of(mesh)

    for metas, recipes in weft.testing.run(on_rank, mesh={"x": 3}):
        assert metas <= 4096 and recipes <= 512 * metas


INDICES = [
    ..., None, 1, slice(1, 3), slice(None), slice(None, None, 2), (..., slice(0, 2)), (None, ...),
    (slice(None), None), (slice(1, None), 1), (0, slice(2)), (..., -1), (slice(-2, None), ...), (),
    (slice(1, 2, None), slice(1, 2, None)), (True,), (1, 1), [1, 0], (slice(torch.tensor(1), 3), 0),
]


@pytest.mark.parametrize("spec", [P(), P("dp"), P(None, "dp")])
def test_indices_are_never_stale(spec: P) -> None:
    """Also those of the short route, which knows slices by their numbers."""
    full = torch.arange(20.0).view(5, 4)

    def on_rank(mesh: Any) -> tuple[list[torch.Tensor], int]:
        x = weft.distribute_tensor(full, mesh, spec)
        found = [x[index].full_tensor() for _ in range(2) for index in INDICES]
        before = weft.cache_info()["recipes"].misses
        for index in INDICES:
            x[index]
        return found, weft.cache_info()["recipes"].misses - before

    for found, misses in weft.testing.run(on_rank, mesh={"dp": 2}):
        for got, index in zip(found, INDICES * 2):
            assert torch.equal(got, full[index]), index
        assert misses <= 2  # indices that hold tensors or lists
