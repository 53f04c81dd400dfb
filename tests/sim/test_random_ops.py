"""Random ops: the same global tensor on every mesh and in every layout, and its gradient.

What a program makes on one rank is the measure for all layouts; that the one rank is right is
checked against dense formulas on the bits of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from tests.harness import ranks
from tests.oracle import block
from weft import Layout, P, ShardTensor
from weft.rng import Source, samples
from weft.tensor.shard_tensor import version_of

SEED = 31
SHAPE = (7, 6)

PLACES: dict[str, tuple[dict[str, int], Any]] = {
    "one rank": ({"x": 1}, P("x")),
    "replicated": ({"x": 2}, P()),
    "rows": ({"x": 2}, P("x")),
    "columns": ({"x": 3}, P(None, "x")),
    "four": ({"x": 4}, P("x")),
    "ragged": ({"x": 3}, (1, 0, 6)),
    "on one": ({"x": 4}, (0, 0, 7, 0)),
    "blocks": ({"dp": 2, "tp": 2}, P("dp", "tp")),
    "one dim": ({"dp": 2, "tp": 2}, P(None, ("tp", "dp"))),
    "half replicated": ({"dp": 2, "tp": 2}, P("tp")),
}
TERMS: dict[str, tuple[dict[str, int], Any]] = {
    "sum": ({"x": 2}, P(partial={"x": "sum"})),
    "half sum": ({"dp": 2, "tp": 2}, P(None, "dp", partial={"tp": "sum"})),
}

X = torch.arange(42, dtype=torch.float32).view(SHAPE) / 8 - 2


def layout(mesh: Any, shape: Sequence[int], where: Any) -> Layout:
    if isinstance(where, tuple):
        return Layout(mesh, shape, P("x"), sizes={0: where})
    return Layout(mesh, shape, where)


def everywhere(
    program: Callable[[Tensor], Any], full: Tensor = X, exact: bool = True,
    places: dict[str, Any] = PLACES | TERMS,
) -> list[Tensor]:
    """Run a program of one operand in all places, each rank's blocks compared with one rank's."""
    expected: list[Tensor] | None = None
    for name, (axes, where) in places.items():
        def on_rank(mesh: Any, where: Any = where) -> Any:
            x = weft.distribute_tensor(
                full, mesh, layout(mesh, full.shape, where), src_data_rank=None
            ).requires_grad_(full.is_floating_point())
            torch.manual_seed(SEED)
            out = program(x)
            outs = list(out) if isinstance(out, (tuple, list)) else [out]
            if outs[0].requires_grad and outs[0].grad_fn is not None:
                outs[0].backward(gradient=torch.ones_like(outs[0]))
                outs.append(x.grad)
            return [
                (one.sharding, one.detach().to_local(), one.detach().full_tensor(), mesh.here)
                for one in outs
            ]

        ranks = weft.testing.run(on_rank, mesh=axes)
        if expected is None:
            expected = [whole for _, _, whole, _ in ranks[0]]
        for rank, mine in enumerate(ranks):
            assert len(mine) == len(expected)
            for (lay, local, whole, here), wanted in zip(mine, expected):
                if exact and name not in TERMS:
                    assert torch.equal(whole, wanted), f"{name}: rank {rank}"
                torch.testing.assert_close(whole, wanted, rtol=2e-6, atol=2e-6)
                if not lay.is_partial:
                    assert torch.equal(local, block(lay, whole, here)), f"{name}: rank {rank}"
    assert expected is not None
    return expected


def written(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """The tensor after a write to a copy of it."""
    def program(x: Tensor) -> Tensor:
        target = x.detach().clone()
        out = write(target)
        assert out is target or out is None
        return target

    return program


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout twice": lambda x: F.dropout(F.dropout(x, 0.3) + x, 0.4),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "eval": lambda x: F.dropout(x, 0.3, training=False),
    "dropout1d": lambda x: F.dropout1d(x[None], 0.5),
    "dropout2d": lambda x: F.dropout2d(x.view(7, 3, 2, 1), 0.5),
    "dropout3d": lambda x: F.dropout3d(x.view(7, 3, 2, 1, 1), 0.5),
    "feature dropout of channels": lambda x: torch.feature_dropout(x, 0.5, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "alpha_dropout of all": lambda x: F.alpha_dropout(x, 1.0, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True),
    "native_dropout eval": lambda x: torch.native_dropout(x, 0.3, False),
    "nn.Dropout": lambda x: nn.Dropout(0.25)(x),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: F.rrelu(x * 1, training=True, inplace=True),
    "rrelu eval": lambda x: F.rrelu(x),
    "rrelu eval in place": lambda x: F.rrelu(x * 1, inplace=True),
    "rand_like": torch.rand_like,
    "rand_like of another dtype": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, -3, 9),
    "randint_like to": lambda x: torch.randint_like(x, 9, dtype=torch.int64),
    "uniform_": written(lambda x: x.uniform_(-1, 3)),
    "normal_": written(lambda x: x.normal_(1, 2)),
    "bernoulli_": written(lambda x: x.bernoulli_(0.3)),
    "exponential_": written(lambda x: x.exponential_(2)),
    "cauchy_": written(lambda x: x.cauchy_(1, 2)),
    "log_normal_": written(lambda x: x.log_normal_(0.5, 0.25)),
    "geometric_": written(lambda x: x.geometric_(0.3)),
    "random_": written(lambda x: x.random_()),
    "random_ to": written(lambda x: x.random_(5)),
    "random_ from to": written(lambda x: x.random_(-3, 7)),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_ of a tensor": lambda x: x.detach().clone().bernoulli_(x.detach().sigmoid()),
    "bernoulli of a number": lambda x: torch.bernoulli(x.detach(), 0.5),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "normal of deviations": lambda x: torch.normal(2.0, x.abs()),
    "normal of both": lambda x: torch.normal(x, x.abs()),
    "normal that broadcasts": lambda x: torch.normal(x[:, :1], torch.arange(6.0)),
    "poisson": lambda x: torch.poisson(x.abs() * 10),
    "binomial": lambda x: torch.binomial((x.detach().abs() * 30).ceil(), x.detach().sigmoid()),
    "binomial that broadcasts": lambda x: torch.binomial(
        torch.full((6,), 9.0), x.detach().sigmoid()
    ),
    "_standard_gamma": lambda x: torch._standard_gamma(x.abs() + 0.25),
    "_sample_dirichlet": lambda x: torch._sample_dirichlet(x.detach().abs() + 0.25),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 3),
    "multinomial of one": lambda x: torch.multinomial(x.sigmoid(), 1),
    "multinomial, replacement": lambda x: torch.multinomial(x.sigmoid(), 9, replacement=True),
    "multinomial of a vector": lambda x: torch.multinomial(x.sigmoid()[1], 4, replacement=True),
    "of a transpose": lambda x: F.dropout(x.t(), 0.5),
    "of a slice": lambda x: F.dropout(x[2:5], 0.5),
    "into a slice": written(lambda x: [x[1:4].normal_()].clear()),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.5),
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x, hard=True),
    "other dtypes": lambda x: [
        torch.rand_like(x, dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
    ],
    "normals of other dtypes": lambda x: [
        torch.randn_like(x, dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64)
    ],
    "integers of other dtypes": lambda x: [
        torch.randint_like(x, 0, 100, dtype=dtype)
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.float64)
    ],
}

_INEXACT = {"gumbel_softmax", "gumbel_softmax hard", "_sample_dirichlet"}  # sums in another order


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_everywhere(name: str) -> None:
    everywhere(PROGRAMS[name], exact=name not in _INEXACT)


@pytest.mark.parametrize("program", [
    lambda x: F.rrelu(x * 1, inplace=True),  # it saves the old value
    lambda x: F.dropout(x.exp(), 0.5, False, inplace=True),  # it writes nothing
])
def test_evaluated_in_place_the_gradient_is_torchs(program: Callable[[Tensor], Any]) -> None:
    x = X.clone().requires_grad_()
    due = program(x)
    due.sum().backward()
    out, grad = everywhere(program)
    torch.testing.assert_close((out, grad), (due.detach(), x.grad))


def bits(call: int, shape: Sequence[int] = SHAPE) -> Source:
    return Source.whole((SEED, call), shape, torch.device("cpu"))


def test_dropout_is_the_mask_of_its_call() -> None:
    for p in (0.3, 0.5):
        out, grad = everywhere(lambda x, p=p: F.dropout(x, p))
        mask = samples.bernoulli(bits(0), 1 - p)
        scale = mask / (1 - p)
        assert torch.equal(out, X * scale) and torch.equal(grad, scale.float())
        assert 0 < int(mask.sum()) < mask.numel()


def test_each_call_has_its_own_numbers() -> None:
    first, second = everywhere(lambda x: [torch.rand_like(x), torch.rand_like(x)])
    assert torch.equal(first, samples.unit(bits(0), torch.float32))
    assert torch.equal(second, samples.unit(bits(1), torch.float32))


def test_feature_dropout_drops_channels() -> None:
    full = torch.ones(3, 4, 2, 5)
    for axes, spec in (({"x": 2}, P(None, None, "x")), ({"x": 2}, P("x")),
                       ({"x": 3}, P(None, "x"))):
        def on_rank(mesh: Any, spec: Any = spec) -> Tensor:
            torch.manual_seed(SEED)
            x = weft.distribute_tensor(full, mesh, spec, src_data_rank=None)
            return F.dropout2d(x, 0.5).full_tensor()

        mask = samples.bernoulli(bits(0, (3, 4, 1, 1)), 0.5)
        for out in weft.testing.run(on_rank, mesh=axes):
            assert torch.equal(out, (mask * 2.0).expand(3, 4, 2, 5))


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (4, 0), (1,), (2, 3, 4)])
def test_shapes(shape: tuple[int, ...]) -> None:
    def program(x: Tensor) -> Any:
        return [F.dropout(x, 0.5), torch.rand_like(x), torch.randn_like(x), x.bernoulli(0.5)]

    full = torch.ones(shape)
    places = {
        "one rank": ({"x": 1}, P()), "replicated": ({"x": 2}, P()),
        **({"rows": ({"x": 3}, P("x"))} if shape else {}),
        **({"last": ({"x": 2}, P(*[None] * (len(shape) - 1), "x"))} if shape else {}),
    }
    everywhere(program, full, places=places)


def test_factories() -> None:
    def make(mesh: Any, where: Any) -> list[ShardTensor]:
        torch.manual_seed(SEED)
        lay = layout(mesh, SHAPE, where)
        where = {"mesh": mesh, "spec": lay}
        return [
            weft.rand(*SHAPE, **where), weft.rand(SHAPE, **where, dtype=torch.float64),
            weft.randn(*SHAPE, **where), weft.randn(*SHAPE, **where, dtype=torch.complex64),
            weft.randint(5, SHAPE, **where), weft.randint(-2, 3, SHAPE, **where),
            weft.randint(-2, 3, SHAPE, **where, dtype=torch.float32),
        ]

    expected = [
        samples.unit(bits(0), torch.float32), samples.unit(bits(1), torch.float64),
        samples.normal(bits(2), torch.float32), samples.normal(bits(3), torch.complex64),
        samples.integers(bits(4), 0, 5, torch.int64),
        samples.integers(bits(5), -2, 3, torch.int64),
        samples.integers(bits(6), -2, 3, torch.float32),
    ]
    for axes, where in (PLACES | TERMS).values():
        for made in weft.testing.run(lambda mesh, w=where: [
            (one.sharding, one.full_tensor(), layout(mesh, SHAPE, w)) for one in make(mesh, w)
        ], mesh=axes):
            for (lay, whole, wanted), value in zip(made, expected):
                assert lay == wanted and torch.equal(whole, value)


@ranks(x=2)
def test_a_factory_makes_a_leaf(mesh: Any) -> None:
    x = weft.randn(4, 4, mesh=mesh, spec=P("x"), requires_grad=True)
    (x * 2).sum().backward()
    assert x.is_leaf and x.grad.sharding == x.sharding
    y = torch.rand_like(x, requires_grad=True)
    assert y.is_leaf and y.requires_grad


def test_randperm() -> None:
    def on_rank(mesh: Any) -> Tensor:
        torch.manual_seed(SEED)
        made = weft.randperm(11, mesh=mesh, spec=P("x"))
        assert made.sharding == Layout(mesh, (11,), P("x"))
        return made.full_tensor()

    found = [one for n in (1, 2, 3) for one in weft.testing.run(on_rank, mesh={"x": n})]
    assert all(torch.equal(one, found[0]) for one in found)
    assert found[0].sort().values.tolist() == list(range(11)) != found[0].tolist()


def test_randint_refuses_an_empty_range() -> None:
    with pytest.raises(RuntimeError, match="'from' to be less than 'to'"):
        weft.testing.run(lambda mesh: weft.randint(3, 3, (2,), mesh=mesh), mesh={"x": 2})


@pytest.mark.parametrize("program", [
    lambda x: x.uniform_(3, 1), lambda x: x.normal_(0, -1), lambda x: x.exponential_(-1),
    lambda x: x.bernoulli_(2.0), lambda x: x.geometric_(1.5), lambda x: x.cauchy_(0, -1),
    lambda x: x.random_(5, 5), lambda x: F.dropout(x, 1.5), lambda x: x.log_normal_(0, 0),
    lambda x: x.uniform_(float("nan"), 1), lambda x: x.uniform_(0, float("inf")),
    lambda x: x.int().uniform_(), lambda x: x.bool().normal_(), lambda x: x.long().exponential_(),
    lambda x: x.byte().random_(0, 300), lambda x: x.bool().random_(2, 3),
    lambda x: torch.rand_like(x, dtype=torch.int32), lambda x: torch.poisson(x.long()),
    lambda x: torch.randint_like(x, 0, 300, dtype=torch.uint8), lambda x: torch.bernoulli(x.int()),
    lambda x: torch.binomial(x.int(), x), lambda x: torch._standard_gamma(x.int()),
    lambda x: torch.multinomial(x, 5), lambda x: torch.multinomial(x, 0),
    lambda x: torch.multinomial(x.int(), 1), lambda x: torch.multinomial(x[None, None], 1),
    lambda x: torch.normal(x, -1.0), lambda x: F.rrelu(x.int(), training=True),
])
def test_arguments_out_of_range_raise_as_in_torch(program: Callable[[Tensor], Any]) -> None:
    errors = []
    for operand in (None, P("x")):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            if operand is None:
                program(torch.ones(4))
            else:
                weft.testing.run(lambda mesh: program(weft.ones(4, mesh=mesh, spec=P("x"))),
                                 mesh={"x": 2})
        errors.append(caught.type)
    assert issubclass(errors[0], errors[1])


@pytest.mark.parametrize("make", [
    lambda **where: weft.rand(4, dtype=torch.int32, **where),
    lambda **where: weft.randn(4, dtype=torch.bool, **where),
    lambda **where: weft.randint(300, (4,), dtype=torch.uint8, **where),
    lambda **where: weft.randint(-1, 3, (4,), dtype=torch.bool, **where),
    lambda **where: weft.randint(4, (4,), dtype=torch.complex64, **where),
    lambda **where: weft.randperm(3, dtype=torch.bool, **where),
])
def test_factories_refuse_what_torch_refuses(make: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match=r"not implemented for|out of bounds|handles only"):
        weft.testing.run(lambda mesh: make(mesh=mesh), mesh={"x": 2})


@pytest.mark.parametrize(("make", "error", "text"), [
    (lambda **where: weft.randint(4, **where), TypeError, "no size is given"),
    (lambda **where: weft.randint(0, 4, **where), TypeError, "no size is given"),
    (lambda **where: weft.rand(3, generator=cast(Any, 5), **where), TypeError,
     "a generator is a torch.Gen"),
    (lambda **where: weft.randperm(257, dtype=torch.uint8, **where), RuntimeError, "overflow"),
    (lambda **where: weft.randperm(2050, dtype=torch.float16, **where), RuntimeError, "2049"),
])
def test_what_factories_cannot_make(make: Callable[..., Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        weft.testing.run(lambda mesh: make(mesh=mesh), mesh={"x": 2})


def test_a_bound_that_is_a_tensor() -> None:
    def on_rank(mesh: Any) -> Any:
        x = weft.ones(4, 5, mesh=mesh, spec=P("x"))
        found = []
        for bound in (9, torch.tensor(9), weft.full((), 9, mesh=mesh), x[0].sum() + 4):
            weft.manual_seed(SEED)
            found.append(torch.randint_like(x, bound).full_tensor())
        return found

    for found in weft.testing.run(on_rank, mesh={"x": 2}):
        assert all(torch.equal(one, found[0]) for one in found)


@ranks(x=2)
def test_where_torch_has_no_derivative_a_backward_raises(mesh: Any) -> None:
    p = weft.full((5,), 0.5, mesh=mesh, spec=P("x"), requires_grad=True)
    drawn = torch.binomial(torch.full_like(p, 9.0), p)
    with pytest.raises(RuntimeError, match="derivative for aten::binomial is not implemented"):
        drawn.sum().backward()
    with pytest.raises(RuntimeError, match="derivative for aten::bernoulli is not implemented"):
        torch.bernoulli(p, 0.5).sum().backward()
    torch.ops.aten.exponential(p).sum().backward()
    assert p.grad.tolist() == [0.0] * 5  # type: ignore[union-attr]


def test_a_draw_lies_as_torchs_does() -> None:
    def on_rank(mesh: Any) -> Any:
        x = weft.ones(4, 5, mesh=mesh, spec=P("x")).t()
        return [torch.bernoulli(x, 0.5).stride(), torch.rand_like(x).stride()]

    plain = torch.ones(4, 5).t()
    due = [torch.bernoulli(plain, 0.5).stride(), torch.rand_like(plain).stride()]
    assert weft.testing.run(on_rank, mesh={"x": 2}) == [due, due]


IMPOSSIBLE: dict[str, Any] = {
    "bernoulli": (lambda x: torch.bernoulli(x), (-1.0, 2.0, torch.nan)),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(x), (-1.0, 2.0, torch.nan)),
    "normal": (lambda x: torch.normal(0.0, x), (-1.0, torch.nan)),
    "normal of means": (lambda x: torch.normal(x, x), (-1.0, torch.nan)),
    "poisson": (torch.poisson, (-1.0, torch.nan)),
    "multinomial of one": (lambda x: torch.multinomial(x, 1), (-4.0, torch.nan, torch.inf)),
    "multinomial": (lambda x: torch.multinomial(x, 2), (-4.0, torch.nan, torch.inf)),
    "multinomial, replacement": (lambda x: torch.multinomial(x, 5, True), (torch.inf,)),
    "categorical": (lambda x: torch.distributions.Categorical(x, validate_args=False).sample(),
                    (-4.0, torch.nan, torch.inf)),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_parameters_are_torchs_error_where_they_are_read(name: str) -> None:
    """On all ranks if all have them, else on those that do."""
    draw, values = IMPOSSIBLE[name]
    for value in values:
        full = torch.full((6, 4), 0.25)
        full[5, 1] = value
        with pytest.raises(RuntimeError) as plain:
            draw(full.clone())

        def on_rank(mesh: Any, full: Tensor = full, said: str = str(plain.value)) -> None:
            weft.rand(1, mesh=mesh)  # seeds are compared at the first draw
            for spec in (P(), P("x")):
                x = weft.distribute_tensor(full, mesh, spec)
                if spec == P("x") and mesh.rank < 2:
                    draw(x)
                    continue
                with pytest.raises(RuntimeError) as told:
                    draw(x)
                assert str(told.value) == said
            assert mesh.everyone().exchange(mesh.rank) == [0, 1, 2]

        weft.testing.run(on_rank, mesh={"x": 3})


@pytest.mark.parametrize("num", [1, 3])
def test_samples_of_sharded_categories_are_whole(num: int) -> None:
    """As argmax's results, for one sample, and topk's: rows do not change ranks."""
    def on_rank(mesh: Any) -> list[Any]:
        x = weft.rand(4, 300, mesh=mesh, placements=P("dp", "tp"))
        return [each.sharding for each in (torch.multinomial(x, num), x.topk(num).indices)]

    for mine, due in weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2}):
        assert mine == due and mine.spec == P("dp", None)


def test_a_row_of_zeros_is_torchs_error() -> None:
    def on_rank(mesh: Any) -> None:
        for num, replacement in ((1, False), (2, False), (3, True)):
            x = weft.distribute_tensor(torch.zeros(2, 4), mesh, P("x"))
            with pytest.raises(RuntimeError, match="sum of probabilities <= 0"):
                torch.multinomial(x, num, replacement)

    weft.testing.run(on_rank, mesh={"x": 2})


def _as_accelerators_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.tensor.families.draws.samplers._may_read", lambda values: False)


def test_rows_that_are_no_distribution_name_no_category(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_accelerators_do(monkeypatch)
    weights = torch.ones(6, 5)
    weights[1], weights[2, 3], weights[3, 0], weights[4, 4] = 0.0, -1.0, torch.nan, torch.inf
    for num, replacement in ((1, False), (2, False), (3, True)):
        (found,) = everywhere(
            lambda x, num=num, replacement=replacement: torch.multinomial(x, num, replacement),
            weights, places={name: PLACES[name] for name in ("one rank", "rows", "columns")},
        )
        assert (found[1:5] == 5).all() and (found[[0, 5]] < 5).all()


def test_a_deviation_below_zero_gives_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_accelerators_do(monkeypatch)
    deviations = torch.tensor([1.0, -1.0, 0.0, torch.nan])

    def on_rank(mesh: Any) -> Tensor:
        return torch.normal(2.0, weft.distribute_tensor(deviations, mesh, P("x"))).full_tensor()

    found = weft.testing.run(on_rank, mesh={"x": 3})[0]
    assert found.isnan().tolist() == [False, True, False, True] and found[2] == 2.0


@ranks(x=2)
def test_a_cached_recipe_draws_anew(mesh: Any) -> None:
    x = weft.ones(40, mesh=mesh, spec=P("x"))
    made = [F.dropout(x, 0.5).full_tensor() for _ in range(4)]
    assert not any(torch.equal(made[0], other) for other in made[1:])


def test_replicas_stay_equal_though_torch_draws_on_one_rank_alone() -> None:
    def on_rank(mesh: Any) -> Tensor:
        torch.manual_seed(0)
        if mesh.rank == 1:
            torch.rand(5)  # a rank's own business
        return weft.rand(6, mesh=mesh).to_local()

    found = weft.testing.run(on_rank, mesh={"x": 3})
    assert all(torch.equal(one, found[0]) for one in found)


def test_plain_draws_are_those_of_torch() -> None:
    def on_rank(mesh: Any) -> Any:
        torch.manual_seed(7)
        first = torch.rand(3)
        F.dropout(weft.ones(8, mesh=mesh, spec=P("x")), 0.5)
        return first, torch.randn(20), F.dropout(torch.ones(9), 0.5)

    torch.manual_seed(7)
    expected = torch.rand(3), torch.randn(20), F.dropout(torch.ones(9), 0.5)
    for found in weft.testing.run(on_rank, mesh={"x": 2}):
        assert all(map(torch.equal, found, expected))


def test_ranks_outside_a_mesh_count_its_calls_apart_from_those_of_all_ranks() -> None:
    def on_rank(inner: Any) -> tuple[Tensor, Any]:
        torch.manual_seed(SEED)
        x = weft.ones(6, mesh=inner, spec=P("x"))
        F.dropout(x, 0.5)
        x.clone().normal_()
        torch.normal(x, x)
        outer = weft.init_mesh({"all": 3})
        return weft.rand(6, mesh=outer, spec=P("all")).full_tensor(), weft.rng_state()

    found = weft.testing.run(on_rank, 3, {"x": 2})
    for numbers, (seed, calls, ((_, of_part),)) in found:
        assert torch.equal(numbers, samples.unit(bits(0, (6,)), torch.float32))
        assert (seed, calls, of_part) == (SEED, 1, 3)
    assert len({state for _, state in found}) == 1


def test_a_generator_of_the_user() -> None:
    def on_rank(mesh: Any) -> Any:
        generator = torch.Generator().manual_seed(5)
        x = weft.zeros(6, mesh=mesh, spec=P("x"))
        first = x.normal_(generator=generator).full_tensor()
        second = x.normal_(generator=generator).full_tensor()
        again = weft.randn(6, mesh=mesh, generator=torch.Generator().manual_seed(5)).full_tensor()
        return first, second, again, weft.rng_state()

    found = [one for n in (1, 3) for one in weft.testing.run(on_rank, mesh={"x": n})]
    for first, second, again, state in found:
        assert torch.equal(first, again) and not torch.equal(first, second)
        assert torch.equal(first, found[0][0]) and torch.equal(second, found[0][1])
        assert state[1] == 0


SEEDED: dict[str, Callable[[Tensor, torch.Generator], Any]] = {
    "uniform_": lambda x, g: x.uniform_(generator=g),
    "exponential_": lambda x, g: x.exponential_(2.0, generator=g),
    "cauchy_": lambda x, g: x.cauchy_(generator=g),
    "log_normal_": lambda x, g: x.log_normal_(generator=g),
    "geometric_": lambda x, g: x.geometric_(0.3, generator=g),
    "random_": lambda x, g: x.random_(9, generator=g),
    "bernoulli_": lambda x, g: x.bernoulli_(0.3, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x, generator=g),
    "normal": lambda x, g: torch.normal(x, x, generator=g),
    "poisson": lambda x, g: torch.poisson(x, generator=g),
    "binomial": lambda x, g: torch.binomial(x, x, generator=g),
    "multinomial": lambda x, g: torch.multinomial(x, 3, generator=g),
    "rand_like": lambda x, g: torch.rand_like(x, generator=g),
    "randint_like": lambda x, g: torch.randint_like(x, 9, generator=g),
    "trunc_normal_": lambda x, g: nn.init.trunc_normal_(x, generator=g),
    "xavier_uniform_": lambda x, g: nn.init.xavier_uniform_(x.view(3, 2), generator=g),
}


@pytest.mark.parametrize("name", SEEDED)
def test_every_draw_takes_a_generator(name: str) -> None:
    def on_rank(mesh: Any) -> Any:
        generator = torch.Generator().manual_seed(5)
        before = generator.get_state()
        found = SEEDED[name](weft.ones(6, mesh=mesh, spec=P("x")), generator).full_tensor()
        assert not torch.equal(before, generator.get_state()) and weft.rng_state()[1] == 0
        return found

    found = [one for n in (1, 3) for one in weft.testing.run(on_rank, mesh={"x": n})]
    assert all(torch.equal(one, found[0]) for one in found)


def test_generators_of_different_seeds_are_noticed() -> None:
    def on_rank(mesh: Any) -> Any:
        generator = torch.Generator().manual_seed(mesh.rank)
        return weft.rand(3, mesh=mesh, generator=generator)

    with pytest.raises(weft.CommunicationError, match="different random states"):
        weft.testing.run(on_rank, mesh={"x": 2})


@ranks(x=2)
def test_random_ops_communicate_nothing(mesh: Any) -> None:
    x = weft.ones(8, 8, mesh=mesh, spec=P("x"))
    with weft.strict(), weft.explain() as log:
        F.dropout(x, 0.5)
        x.clone().normal_()
        torch.bernoulli(x * 0.5)
        torch.normal(x, x)
    assert not log.events


class Noisy(torch.autograd.Function):
    """A user's dropout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) < 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


ON_FULL_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "a user's function": Noisy.apply,
    "rand into a tensor": lambda x: torch.rand(SHAPE, out=torch.empty_like(x)),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x[None, None], 2, (3, 3)),
}


@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
@pytest.mark.parametrize("name", ON_FULL_TENSORS)
def test_what_runs_on_full_tensors_draws_the_same_everywhere(name: str) -> None:
    """Though ranks have drawn differently from torch's own generators, which it leaves alone."""
    def program(x: Any) -> Any:
        torch.rand(1 + x.device_mesh.rank)
        state = torch.default_generator.get_state()
        first, second = ON_FULL_TENSORS[name](x), ON_FULL_TENSORS[name](x)
        assert torch.equal(torch.default_generator.get_state(), state)
        assert not torch.equal(first.detach().full_tensor(), second.detach().full_tensor())
        assert weft.rng_state() == (SEED, 2)
        return [first, second]

    everywhere(program)


@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
@ranks(x=2)
def test_what_draws_nothing_counts_no_call(mesh: Any) -> None:
    x = weft.ones(4, 4, mesh=mesh, spec=P("x"))
    before = weft.rng_state()
    torch.linalg.inv(x + torch.eye(4))
    assert weft.rng_state() == before


def test_the_gradient_of_gamma_is_torchs() -> None:
    def program(x: Tensor) -> Tensor:
        return torch._standard_gamma(x.abs() + 0.25)

    out, grad = everywhere(program)
    wanted = torch._standard_gamma_grad(X.abs() + 0.25, out) * X.sign()
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("replacement", [True, False])
def test_multinomial_has_the_right_shares(replacement: bool) -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0]).expand(6000, 4)

    def on_rank(mesh: Any) -> Tensor:
        torch.manual_seed(SEED)
        x = weft.distribute_tensor(weights, mesh, P("x"), src_data_rank=None)
        return torch.multinomial(x, 2, replacement).full_tensor()

    found, other = weft.testing.run(on_rank, mesh={"x": 2})
    assert torch.equal(found, other)
    shares = found[:, 0].bincount(minlength=4) / len(found)
    torch.testing.assert_close(shares, weights[0] / 8, atol=0.03, rtol=0)
    same = float((found[:, 0] == found[:, 1]).double().mean())
    assert abs(same - (1 + 4 + 25) / 64) < 0.03 if replacement else same == 0.0


ATTENTION: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.4),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, dropout_p=0.4, is_causal=True, scale=0.3),
    "bool mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.ones(5, 5, dtype=torch.bool).tril(-1), dropout_p=0.4),
    "float mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5), dropout_p=0.4),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, :2], v[:, :2], dropout_p=0.4, enable_gqa=True),
    "one head": lambda q, k, v: F.scaled_dot_product_attention(
        q[0, 0], k[0, 0], v[0, 0], dropout_p=0.4),
}
HEADS: dict[str, tuple[dict[str, int], P]] = {
    "one rank": ({"x": 1}, P()), "batch": ({"x": 2}, P("x")), "heads": ({"x": 4}, P(None, "x")),
    "sequence": ({"x": 3}, P(None, None, "x")), "both": ({"dp": 2, "tp": 2}, P("dp", "tp")),
    "sequence by heads": ({"x": 2}, P(None, None, "x")),
    "sequence and heads": ({"dp": 2, "tp": 2}, P(None, "dp", "tp")),
    "sequence and batch": ({"dp": 2, "tp": 2}, P("dp", None, "tp")),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_with_dropout(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = torch.randn(3, 2, 4, 5, 6, generator=generator, dtype=torch.float64)

    def on_rank(mesh: Any, spec: P) -> list[Tensor]:
        operands = [
            weft.distribute_tensor(one, mesh, spec, src_data_rank=None).requires_grad_()
            for one in (q, k, v)
        ]
        torch.manual_seed(SEED)
        out = ATTENTION[name](*operands)
        (out * out).sum().backward()
        return [one.detach().full_tensor() for one in (out, *(one.grad for one in operands))]

    expected = _dense_attention(name, q, k, v)
    for axes, spec in HEADS.values():
        for found in weft.testing.run(lambda mesh, s=spec: on_rank(mesh, s), mesh=axes):
            for mine, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)


def _dense_attention(name: str, *operands: Tensor) -> list[Tensor]:
    """torch's own attention in parts: its weights come out where the values are the identity."""
    leaves = [one.clone().requires_grad_() for one in operands]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout_p: float = 0.0,
               enable_gqa: bool = False, **options: Any) -> Tensor:
        if enable_gqa:
            k, v = (one.repeat_interleave(2, -3) for one in (k, v))
        eye = torch.eye(5, dtype=torch.float64).expand(*k.shape[:-1], 5)
        weights = sdpa(q, k, eye, mask, **options)
        noise = samples.bernoulli(bits(0, weights.shape), 1 - dropout_p).double()
        return (weights * noise / (1 - dropout_p)) @ v

    sdpa = F.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attend)
        out = ATTENTION[name](*leaves)
    (out * out).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def test_modules_with_dropout_inside() -> None:
    """torch's own transformer layer and multi-head attention, in training."""
    full = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def on_rank(mesh: Any, spec: P) -> list[Tensor]:
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True, dtype=torch.float64)
        weft.distribute_module(layer, mesh)
        x = weft.distribute_tensor(full, mesh, spec, src_data_rank=None)
        torch.manual_seed(SEED)
        out = layer(x)
        mixed = layer.self_attn(x, x, x, need_weights=True)[0]
        (out * out).sum().backward()
        grads = [one.grad.full_tensor() for one in layer.parameters()]
        return [out.detach().full_tensor(), mixed.detach().full_tensor(), *grads]

    expected = weft.testing.run(lambda mesh: on_rank(mesh, P()), mesh={"x": 1})[0]
    for spec in (P("x"), P(None, "x"), P()):
        for found in weft.testing.run(lambda mesh, s=spec: on_rank(mesh, s), mesh={"x": 2}):
            for mine, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("draw", [
    lambda x: x.normal_(), lambda x: x.uniform_(), lambda x: x.bernoulli_(0.5),
    lambda x: x[:1].normal_(), lambda x: x[0].exponential_(),
], ids=["normal", "uniform", "bernoulli", "block", "row"])
@pytest.mark.parametrize("sizes", [(6, 0, 0), (2, 2, 2)])
def test_a_draw_counts_as_a_write_on_ranks_without_elements(draw: Any, sizes: Any) -> None:
    """Else they alone would find what other ranks have forgotten: a moved operand, say."""
    def on_rank(mesh: Any) -> bool:
        layout = Layout(mesh.abstract, (6, 4), P("x"), sizes={0: sizes})
        x: Any = weft.distribute_tensor(torch.zeros(6, 4), mesh, layout)
        before = version_of(x)
        draw(x)
        return version_of(x) > before

    assert weft.testing.run(on_rank, mesh={"x": 3}) == [True] * 3
