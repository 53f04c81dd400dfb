"""The shared cases themselves: named once, reproducible, and covering the layouts they claim."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from tests.cases import Case, case, integers, reals, trials
from tests.cases.every import EVERY
from tests.cases.layouts import layouts_of, ragged
from tests.harness import dense_outcome, local_part
from tests.oracle import coordinates, reduce_partials
from weft.core import Mesh

GRID = Mesh({"dp": 2, "tp": 2})
WORKSPACE = "least_squares_of_wide"
"""LAPACK's last bits depend on where its workspace lies."""


def test_names_are_unique() -> None:
    names = [case.name for case in EVERY]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_a_case_is_reproducible(case: Case) -> None:
    results, gradients = dense_outcome(case)
    again = dense_outcome.__wrapped__(case)
    rtol, atol = (1e-12, 1e-13) if case.name == WORKSPACE else (0, 0)
    torch.testing.assert_close((results, gradients), again, rtol=rtol, atol=atol, equal_nan=True)
    assert not case.grad or any(gradient is not None for gradient in gradients)


def test_trials_are_the_same_at_every_start() -> None:
    some = case("some", torch.add, reals(6, 5), reals(5))
    ids = [trial.id for trial in trials(some)]
    assert ids == [trial.id for trial in trials(some)] and len(set(ids)) == len(ids)
    assert ids[0] == "some-x2-s0?-s0!"


def test_layouts_cover_every_kind() -> None:
    names = set(layouts_of(GRID, (5, 4)))
    assert {"r", "s0.d", "s1.t", "s0.dt", "s0.td", "s0.d+s1.t", "s0.dt!", "s0.dt?", "s0.dt%",
            "p.t", "p.dt", "s0.d+p.t"} <= names
    line = layouts_of(Mesh({"x": 3}), (7,))
    assert line["s0"].sizes_of(0) == (3, 3, 1)
    assert line["s0?"].sizes_of(0)[0] == 0 and line["s0%"].sizes_of(0) == (0, 0, 7)
    assert "p" not in layouts_of(Mesh({"x": 3}), (7,), partial=False)


def test_ragged_sizes_sum_to_the_length() -> None:
    assert all(sum(ragged(7, count, "seed")) == 7 for count in (1, 2, 4))


@pytest.mark.parametrize("operand", [reals(5, 4), integers(5, 4)], ids=["float", "int"])
def test_terms_sum_to_the_value_differ_and_vary_in_sign(operand) -> None:
    dense = operand.make(torch.Generator().manual_seed(0))
    layout = layouts_of(GRID, (5, 4))["p.dt"]
    terms = [local_part(layout, dense, place, seed=1) for place in coordinates(layout)]
    torch.testing.assert_close(reduce_partials(layout, torch.stack(terms)), dense)
    assert len({tuple(term.flatten().tolist()) for term in terms}) == 4
    assert all((term < 0).any() and (term > 0).any() for term in terms)


NUMBERS: dict[str, Callable[[], torch.Tensor]] = {
    "any": lambda: torch.randn(5, 4, dtype=torch.float64) * 5,
    "small": lambda: torch.randn(5, 4, dtype=torch.float64) * 1e-300,
    "large": lambda: torch.randn(5, 4, dtype=torch.float64) * 1e300,
    "quarters": lambda: torch.randint(-9, 9, (5, 4)).double() / 4,
    "complex": lambda: torch.randn(5, 4, dtype=torch.complex128) * 5,
}


@pytest.mark.parametrize("numbers", NUMBERS)
def test_terms_add_up_without_rounding_in_any_order(numbers: str) -> None:
    torch.manual_seed(0)
    dense = NUMBERS[numbers]()
    layout = layouts_of(GRID, (5, 4))["p.dt"]
    terms = [local_part(layout, dense, place, seed=1) for place in coordinates(layout)]
    for one, two, three, four in itertools.permutations(terms):
        assert torch.equal(((one + two) + three) + four, dense)
        assert torch.equal((one + two) + (three + four), dense)
    unequal = [not torch.equal(one, other) for one, other in itertools.combinations(terms, 2)]
    assert all(unequal)
