"""The samplers: moments, Kolmogorov's and chi-squared distances, independence of neighbours.

Seeds are fixed, so a failure is no accident. Bounds are about 5 deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from weft.rng import Source, rejection, samples

N = 1 << 18
CPU = torch.device("cpu")


def source(call: int = 0, *shape: int) -> Source:
    return Source.whole((1234, call), shape or (N,), CPU)


def distance(values: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """Kolmogorov's distance between the values and a continuous distribution, times sqrt(n)."""
    values = values.double().sort().values
    ranks = torch.arange(1, len(values) + 1, dtype=torch.float64) / len(values)
    return float((cdf(values) - ranks).abs().max()) * math.sqrt(len(values))


def chi_squared(counts: Tensor, expected: Tensor) -> float:
    """How many deviations the statistic is from its mean."""
    free = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - free) / math.sqrt(2 * free)


CONTINUOUS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "unit32": (lambda: samples.unit(source(1), torch.float32), lambda x: x),
    "unit64": (lambda: samples.unit(source(2), torch.float64), lambda x: x),
    "uniform": (lambda: samples.uniform(source(3), torch.float32, -2.0, 6.0),
                lambda x: (x + 2) / 8),
    "normal32": (lambda: samples.normal(source(4), torch.float32), torch.special.ndtr),
    "normal64": (lambda: samples.normal(source(5), torch.float64), torch.special.ndtr),
    "normal": (lambda: samples.normal(source(6), torch.float32, 3.0, 0.5),
               lambda x: torch.special.ndtr((x - 3.0) / 0.5)),
    "exponential32": (lambda: samples.exponential(source(7), torch.float32, 2.0),
                      lambda x: -torch.expm1(-2.0 * x)),
    "exponential64": (lambda: samples.exponential(source(8), torch.float64, 2.0),
                      lambda x: -torch.expm1(-2.0 * x)),
    "cauchy": (lambda: samples.cauchy(source(9), torch.float32, 1.0, 3.0),
               lambda x: torch.atan((x - 1.0) / 3.0) / math.pi + 0.5),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_kolmogorov(name: str) -> None:
    draw, cdf = CONTINUOUS[name]
    assert distance(draw(), cdf) < 2.0


@pytest.mark.parametrize("name", ["normal32", "normal64"])
def test_tails_and_moments_of_normals(name: str) -> None:
    values = CONTINUOUS[name][0]().double()
    for order, moment, deviation in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        bound = 5 * math.sqrt(deviation / N)
        assert abs(float((values**order).mean()) - moment) < bound, order
    far = float((values.abs() > 4.0).sum())
    expected = 2 * float(torch.special.ndtr(torch.tensor(-4.0, dtype=torch.float64))) * N
    assert abs(far - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_bernoulli(p: float) -> None:
    mean = float(samples.bernoulli(source(10), p).double().mean())
    of_tensor = samples.bernoulli_of(source(10), torch.full((N,), p, dtype=torch.float64))
    assert abs(mean - p) < 5 * math.sqrt(p * (1 - p) / N)
    assert torch.equal(of_tensor, samples.bernoulli(source(10), p))


def test_certain_and_impossible() -> None:
    assert samples.bernoulli(source(11), 1.0).all() and not samples.bernoulli(source(11), 0.0).any()
    ends = torch.tensor([0.0, 1.0]).repeat(N // 2)
    assert torch.equal(samples.bernoulli_of(source(11), ends), ends.bool())


@pytest.mark.parametrize(("low", "high"), [(0, 2), (-5, 12), (0, 1000), (-(1 << 62), 1 << 63),
                                           (-(1 << 63), 1 << 63), (7, (1 << 33) + 10)])
def test_integers_are_uniform(low: int, high: int) -> None:
    values = samples.integers(source(12), low, high, torch.int64)
    assert int(values.min()) >= low and int(values.max()) < high
    length = high - low
    num = min(length, 64)
    bins = ((values.double() - float(low)) / float(length) * num).floor().long().clamp(0, num - 1)
    edges = [-(-length * at // num) for at in range(num + 1)]
    expected = torch.tensor([
        float(stop - start) / float(length) * N for start, stop in pairwise(edges)
    ], dtype=torch.float64)
    assert abs(chi_squared(bins.bincount(minlength=num).double(), expected)) < 5


def test_geometric() -> None:
    p = 0.3
    counts = samples.geometric(source(13), torch.int64, p).bincount(minlength=20)[1:20].double()
    expected = N * p * (1 - p) ** torch.arange(19, dtype=torch.float64)
    assert abs(chi_squared(counts, expected)) < 5


def test_bits_are_fair_and_neighbours_independent() -> None:
    bits = source(14).bits64()
    for place in range(64):
        ones = float(((bits >> place) & 1).double().mean())
        assert abs(ones - 0.5) < 5 * 0.5 / math.sqrt(N), place
    for lag in (1, 2, 3, 8, 1024):
        values = samples.unit(source(15), torch.float64) - 0.5
        product = float((values[lag:] * values[:-lag]).mean()) * 12
        assert abs(product) < 5 / math.sqrt(N), lag


def test_calls_seeds_and_substreams_are_independent() -> None:
    base = samples.unit(source(16), torch.float64) - 0.5
    others = [
        samples.unit(source(17), torch.float64), samples.unit(source(16), torch.float64, sub=1),
        samples.unit(Source.whole((1235, 16), (N,), CPU), torch.float64),
    ]
    for other in others:
        assert abs(float((base * (other - 0.5)).mean()) * 12) < 5 / math.sqrt(N)


def test_pairs_of_values_fill_the_square() -> None:
    """Serial test: neighbours in 16 by 16 cells."""
    values = samples.unit(source(18), torch.float32).view(-1, 2)
    cells = (values * 16).long()
    counts = (cells[:, 0] * 16 + cells[:, 1]).bincount(minlength=256).double()
    assert abs(chi_squared(counts, torch.full_like(counts, N / 2 / 256))) < 5


def test_normals_of_a_pair_are_uncorrelated_in_squares_too() -> None:
    values = samples.normal(source(19), torch.float32).double().view(-1, 2)
    for order in (1, 2):
        first, second = (values[:, at] ** order for at in (0, 1))
        assert abs(float(torch.corrcoef(torch.stack((first, second)))[0, 1])) < 5 / math.sqrt(N / 2)


def test_permutations_are_uniform() -> None:
    """All 24 orders of 4 things."""
    codes = torch.zeros(24)
    for call in range(4800):
        order = samples.permutation(Source.whole((7, call), (4,), CPU)).tolist()
        rank, left = 0, list(range(4))
        for one in order:
            rank = rank * len(left) + left.index(one)
            left.remove(one)
        codes[rank] += 1
    assert abs(chi_squared(codes.double(), torch.full((24,), 200.0, dtype=torch.float64))) < 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_ranges_keep_their_ends(dtype: torch.dtype) -> None:
    values = samples.unit(source(20), dtype)
    assert values.dtype is dtype and float(values.min()) >= 0.0 and float(values.max()) < 1.0
    near = samples.uniform(source(21), dtype, 255.0, 256.0)
    assert float(near.min()) >= 255.0 and float(near.max()) < 256.0
    assert float(samples.exponential(source(22), dtype).min()) > 0.0
    assert samples.normal(source(23), dtype).isfinite().all()
    assert (samples.uniform(source(24), dtype, 3.0, 3.0) == 3.0).all()


@pytest.mark.parametrize("shape", [0.05, 0.7, 1.0, 2.5, 40.0, 1e4])
def test_gamma(shape: float) -> None:
    values = rejection.gamma(source(30), torch.full((N,), shape))
    rate = torch.tensor(shape, dtype=torch.float64)
    assert distance(values, lambda x: torch.special.gammainc(rate, x)) < 2.0


def counted(values: Tensor, log_mass: Callable[[Tensor], Tensor], low: int, high: int) -> float:
    """Chi squared over the counts from `low` to `high`, the rest put to the ends."""
    bins = torch.arange(low, high + 1, dtype=torch.float64)
    mass = log_mass(bins).exp()
    counts = (values.clamp(low, high) - low).long().bincount(minlength=high - low + 1).double()
    inside = mass * N > 20
    inside[0] = inside[-1] = False
    rest = 1.0 - float(mass[inside].sum())
    tested = torch.cat([counts[inside], counts[~inside].sum()[None]])
    expected = torch.cat([mass[inside], torch.tensor([rest], dtype=torch.float64)]) * N
    if float(expected[-1]) < 20:
        tested, expected = tested[:-1], expected[:-1]
        expected = expected * (tested.sum() / expected.sum())
    return chi_squared(tested, expected)


@pytest.mark.parametrize("rate", [0.1, 3.0, 9.99, 10.0, 30.0, 500.0])
def test_poisson(rate: float) -> None:
    values = rejection.poisson(source(31), torch.full((N,), rate, dtype=torch.float64))
    spread = 8 * math.sqrt(rate) + 8
    assert abs(counted(
        values, lambda k: k * math.log(rate) - rate - torch.lgamma(k + 1),
        max(0, int(rate - spread)), int(rate + spread),
    )) < 5


@pytest.mark.parametrize(("count", "p"), [(3, 0.3), (20, 0.1), (15, 0.9), (40, 0.5), (1000, 0.01),
                                          (1000, 0.3), (5000, 0.97)])
def test_binomial(count: int, p: float) -> None:
    full = torch.full((N,), float(count), dtype=torch.float64)
    values = rejection.binomial(source(32), full, torch.full((N,), p, dtype=torch.float64))
    assert float(values.min()) >= 0 and float(values.max()) <= count
    spread = 8 * math.sqrt(count * p * (1 - p)) + 8

    def log_mass(k: Tensor) -> Tensor:
        ways = math.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
        return ways + k * math.log(p) + (count - k) * math.log1p(-p)

    low, high = max(0, int(count * p - spread)), min(count, int(count * p + spread))
    assert abs(counted(values, log_mass, low, high)) < 5


def test_counts_that_are_certain() -> None:
    ends = torch.tensor([0.0, 1.0]).repeat(8)
    here = source(33, 16)
    assert torch.equal(rejection.binomial(here, torch.full((16,), 7.0), ends), 7.0 * ends.double())
    assert not rejection.binomial(here, torch.zeros(16), torch.full((16,), 0.5)).any()
    assert not rejection.poisson(here, torch.zeros(16)).any()


def test_parameters_out_of_range_give_nan() -> None:
    here, wrong = source(35, 4), torch.tensor([-1.0, torch.nan, torch.inf, 12.0])
    for found in (rejection.gamma(here, wrong), rejection.poisson(here, wrong),
                  rejection.binomial(here, wrong, torch.full((4,), 0.5)),
                  rejection.binomial(here, torch.full((4,), 7.0), wrong / 24)):
        assert found[:2].isnan().all() and found[3].isfinite()
    assert rejection.gamma(here, wrong)[2].isnan() and rejection.poisson(here, wrong)[2].isnan()
    assert (rejection.gamma(here, torch.zeros(4)) == 0.0).all()


def test_rejections_leave_the_neighbours_alone() -> None:
    """A box of the values is the values of the box, though other boxes take other attempts."""
    shape = (40, 30)
    rates = torch.linspace(0.01, 60.0, 1200, dtype=torch.float64).view(shape)
    for draw in (rejection.gamma, rejection.poisson,
                 lambda here, rate: rejection.binomial(here, (rate * 5).ceil(), rate / 61)):
        whole = draw(source(34, *shape), rates)
        for box in (((0, 7), (0, 30)), ((3, 40), (4, 5)), ((1, 2), (2, 3)), ((0, 0), (0, 30))):
            place = tuple(slice(*side) for side in box)
            part = draw(Source((1234, 34), shape, box, CPU), rates[place])
            assert torch.equal(part, whole[place])
