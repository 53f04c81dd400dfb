"""`torch.nn.init` and `torch.distributions` on ShardTensors: the same in every layout."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as dist

import weft
from tests.effort import EFFORT
from tests.harness import ranks
from tests.sim.test_random_ops import PLACES, SEED, TERMS, everywhere, written
from weft import P

init = nn.init
INITS: dict[str, Callable[[Tensor], Any]] = {
    "uniform_": lambda w: init.uniform_(w, -1, 2),
    "normal_": lambda w: init.normal_(w, 1, 2),
    "trunc_normal_": lambda w: init.trunc_normal_(w, 0.5, 1, -0.5, 1),
    "trunc_normal_ of little": lambda w: init.trunc_normal_(w, 0.0, 1.0, 0.5, 0.6),
    "xavier_uniform_": init.xavier_uniform_,
    "xavier_normal_": init.xavier_normal_,
    "kaiming_uniform_": init.kaiming_uniform_,
    "kaiming_normal_": lambda w: init.kaiming_normal_(w, nonlinearity="relu"),
    "orthogonal_": init.orthogonal_,
    "sparse_": lambda w: init.sparse_(w, 0.4),
    "constant_": lambda w: init.constant_(w, 3),
    "ones_": init.ones_,
    "zeros_": init.zeros_,
    "eye_": init.eye_,
}


@pytest.mark.parametrize("name", INITS)
def test_init(name: str) -> None:
    everywhere(written(INITS[name]))


@pytest.mark.parametrize("name", INITS)
@ranks(x=2)
def test_init_of_a_parameter(mesh: Any, name: str) -> None:
    """Initialisers record no gradient: they write to leaves."""
    weight = nn.Parameter(weft.ones(6, 4, mesh=mesh, spec=P("x")))
    assert INITS[name](weight) is weight and weight.is_leaf and weight.requires_grad
    (weight * 2).sum().backward()
    assert weight.grad.sharding == weight.sharding


def test_dirac() -> None:
    full = torch.zeros(4, 3, 3)
    for axes, spec in (({"x": 2}, P("x")), ({"x": 3}, P(None, "x")), ({"x": 2}, P())):
        found = weft.testing.run(lambda mesh, s=spec: init.dirac_(
            weft.distribute_tensor(full, mesh, s, src_data_rank=None)
        ).full_tensor(), mesh=axes)
        assert torch.equal(found[0], init.dirac_(full.clone()))


def test_sparse_has_its_zeros() -> None:
    (out,) = everywhere(written(lambda w: init.sparse_(w, 0.4)))
    zeros = out == 0
    assert (zeros.sum(0) == 3).all() and len(set(map(tuple, zeros.t().tolist()))) > 1


def test_orthogonal_is() -> None:
    (out,) = everywhere(written(init.orthogonal_))
    torch.testing.assert_close(out.t() @ out, torch.eye(6), atol=1e-5, rtol=0)


def test_a_module_starts_alike_on_every_mesh() -> None:
    """`reset_parameters` of a distributed module, as after a deferred initialisation."""
    def on_rank(mesh: Any, spec: P) -> list[Tensor]:
        layer = nn.Linear(6, 8)
        weft.distribute_module(layer, mesh, shardings={"weight": spec})
        torch.manual_seed(SEED)
        layer.reset_parameters()
        return [one.detach().full_tensor() for one in layer.parameters()]

    expected = weft.testing.run(lambda mesh: on_rank(mesh, P()), mesh={"x": 1})[0]
    for spec in (P("x"), P(None, "x"), P()):
        for found in weft.testing.run(lambda mesh, s=spec: on_rank(mesh, s), mesh={"x": 3}):
            assert all(map(torch.equal, found, expected))


def positive(x: Tensor) -> Tensor:
    return x.abs() + 0.25


SAMPLES: dict[str, Callable[[Tensor], Any]] = {
    "Normal": lambda x: dist.Normal(x, positive(x)).sample(),
    "Normal, rsample": lambda x: dist.Normal(x, positive(x)).rsample(),
    "Normal of a number": lambda x: dist.Normal(x, 2.0).rsample((2,)),
    "LogNormal": lambda x: dist.LogNormal(x / 4, 0.5).rsample(),
    "HalfNormal": lambda x: dist.HalfNormal(positive(x)).rsample(),
    "Uniform": lambda x: dist.Uniform(x, x + positive(x)).rsample((2,)),
    "Bernoulli": lambda x: dist.Bernoulli(logits=x).sample(),
    "RelaxedBernoulli": lambda x: dist.RelaxedBernoulli(torch.tensor(0.5), logits=x).rsample(),
    "Exponential": lambda x: dist.Exponential(positive(x)).rsample(),
    "Laplace": lambda x: dist.Laplace(x, positive(x)).rsample(),
    "Cauchy": lambda x: dist.Cauchy(x, positive(x)).rsample(),
    "HalfCauchy": lambda x: dist.HalfCauchy(positive(x)).rsample(),
    "Gumbel": lambda x: dist.Gumbel(x, positive(x)).rsample(),
    "Weibull": lambda x: dist.Weibull(positive(x), positive(x)).rsample(),
    "Pareto": lambda x: dist.Pareto(positive(x), positive(x)).rsample(),
    "Kumaraswamy": lambda x: dist.Kumaraswamy(positive(x), positive(x)).rsample(),
    "ContinuousBernoulli": lambda x: dist.ContinuousBernoulli(logits=x).rsample(),
    "Geometric": lambda x: dist.Geometric(logits=x).sample(),
    "Gamma": lambda x: dist.Gamma(positive(x), positive(x)).rsample(),
    "InverseGamma": lambda x: dist.InverseGamma(positive(x), positive(x)).rsample(),
    "Chi2": lambda x: dist.Chi2(positive(x)).rsample(),
    "StudentT": lambda x: dist.StudentT(positive(x) + 2, x).rsample(),
    "FisherSnedecor": lambda x: dist.FisherSnedecor(positive(x), positive(x)).rsample(),
    "Beta": lambda x: dist.Beta(positive(x), positive(x)).rsample(),
    "Dirichlet": lambda x: dist.Dirichlet(positive(x)).rsample(),
    "Poisson": lambda x: dist.Poisson(positive(x) * 8).sample((2,)),
    "Binomial": lambda x: dist.Binomial(30, logits=x).sample(),
    "NegativeBinomial": lambda x: dist.NegativeBinomial(4.0, logits=x / 4).sample(),
    "Categorical": lambda x: dist.Categorical(logits=x).sample((4,)),
    "OneHotCategorical": lambda x: dist.OneHotCategorical(logits=x).sample(),
    "RelaxedOneHotCategorical": lambda x: dist.RelaxedOneHotCategorical(
        torch.tensor(0.5), logits=x).rsample(),
    "Multinomial": lambda x: dist.Multinomial(5, logits=x).sample(),
    "VonMises": lambda x: dist.VonMises(x, positive(x)).sample(),
    "MultivariateNormal": lambda x: dist.MultivariateNormal(x, torch.eye(6)).rsample(),
    "Wishart": lambda x: dist.Wishart(
        torch.tensor(9.0), (positive(x).mean() * 0 + 1) * torch.eye(6)).sample(),
    "Wishart of a batch": lambda x: dist.Wishart(
        positive(x)[:, 0] + 9, torch.diag_embed(positive(x)) + 0.1).sample((2,)),
    "LowRankMultivariateNormal": lambda x: dist.LowRankMultivariateNormal(
        x, x[:, :, None], positive(x)).rsample(),
    "GeneralizedPareto": lambda x: dist.GeneralizedPareto(x, positive(x), x / 8 + 0.3).rsample(),
    "LogisticNormal": lambda x: dist.LogisticNormal(x, positive(x)).rsample(),
    "OneHotCategoricalStraightThrough": lambda x: dist.OneHotCategoricalStraightThrough(
        logits=x).rsample(),
    "LKJCholesky": lambda x: dist.LKJCholesky(3, positive(x)[0, 0]).sample(),
    "MixtureSameFamily": lambda x: dist.MixtureSameFamily(
        dist.Categorical(logits=x), dist.Normal(x, 1.0)).sample(),
    "Independent": lambda x: dist.Independent(dist.Normal(x, 1.0), 1).rsample(),
    "TransformedDistribution": lambda x: dist.TransformedDistribution(
        dist.Normal(x, 1.0), [dist.transforms.SigmoidTransform()]).rsample(),
}


ALL = PLACES | TERMS


def some_places(name: str) -> dict[str, Any]:
    """Those to compare with one rank, drawn by the name of the sampler: what samplers consist of
    is tried in all places (`test_random_ops`)."""
    others = ["rows", "ragged", "blocks", "half replicated", "half sum"]
    count = min(len(others), math.ceil(EFFORT * len(others)))
    chosen = random.Random(name).sample(others, count)
    return {place: ALL[place] for place in ("one rank", *chosen)}


@pytest.mark.filterwarnings("ignore::weft.WeftWarning", "ignore:Singular sample")
@pytest.mark.parametrize("name", SAMPLES)
def test_distributions(name: str) -> None:
    """Though torch's own generators of the ranks have drawn differently, and stay as they are."""
    def program(x: Any) -> Any:
        torch.rand(1 + x.device_mesh.rank)
        state = torch.default_generator.get_state()
        first, second = SAMPLES[name](x), SAMPLES[name](x)
        assert torch.equal(torch.default_generator.get_state(), state)
        assert not torch.equal(first.detach().full_tensor(), second.detach().full_tensor())
        return [first, second]

    everywhere(program, exact=False, places=some_places(name))


def test_every_distribution_of_torch_is_tried() -> None:
    named = {name.split(",")[0].split(" ")[0] for name in SAMPLES}
    assert named == set(dist.__all__) & {
        name for name in dist.__all__ if isinstance(getattr(dist, name), type)
        and issubclass(getattr(dist, name), dist.Distribution)
    } - {"Distribution", "ExponentialFamily"}
    inits = {name for name in dir(init) if name.endswith("_") and not name.startswith("_")}
    assert inits - {name.split(" ")[0] for name in INITS} == {"dirac_"}  # has a test of its own


def test_plain_distributions_are_those_of_torch() -> None:
    torch.manual_seed(2)
    found = dist.Normal(torch.zeros(3), 1.0).rsample(), dist.Dirichlet(torch.ones(3)).rsample()
    torch.manual_seed(2)
    normal = torch.empty(3).normal_()
    assert torch.equal(found[0], normal)
    assert torch.equal(found[1], torch._sample_dirichlet(torch.ones(3)))


@ranks(x=2)
def test_each_rank_draws_its_own_part_only(mesh: Any) -> None:
    """The noise of a sharded distribution lies as its parameters do: nothing is communicated."""
    x = weft.ones(8, 4, mesh=mesh, spec=P("x"))
    for made in (dist.Normal(x, x), dist.Gamma(x, x), dist.Laplace(x, x), dist.Beta(x, x),
                 dist.Poisson(x), dist.Uniform(x, x * 2)):
        with weft.explain() as log:
            out = made.sample((3,))
        assert not log.events, type(made).__name__
        assert out.sharding.sizes_of(1) == (4, 4)


def test_orthogonal_of_more_columns_than_rows_and_of_three_dims() -> None:
    for full in (torch.zeros(7, 9), torch.zeros(7, 2, 4)):
        (out,) = everywhere(written(lambda w: init.orthogonal_(w, 2.0)), full)
        rows = out.flatten(1)
        torch.testing.assert_close(rows @ rows.t(), 4 * torch.eye(len(rows)), atol=1e-5, rtol=0)
