"""Models train on a mesh as they do on plain tensors."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

import weft
from tests.effort import drawn
from tests.models.catalogue import MODELS
from tests.models.training import WAYS, Outcome, compare, on_mesh, plain

ATTENTIONS = {"even": "eager", "uneven": "sdpa"}
CASES = [(way, name) for way, name in product(WAYS, MODELS) if way != "one rank"]
STEPS = 8
WITH_DROPOUT = 4
"""Fewer: what is new there are the masks, and those of each step are drawn by one rule."""

plainly = cache(plain)


def on_ranks(way: str, name: str, size: str, attention: str, dropout: float = 0.0) -> list[Outcome]:
    steps = WITH_DROPOUT if dropout else STEPS
    return weft.testing.run(
        lambda bound: on_mesh(bound, way, name, size, attention, steps, dropout),
        mesh=WAYS[way].mesh,
    )


@pytest.mark.parametrize(
    ("size", "way", "name"), drawn([(size, *case) for size in ATTENTIONS for case in CASES]))
def test_as_on_plain_tensors(way: str, name: str, size: str) -> None:
    """Even sizes with eager attention, uneven ones with sdpa; warnings of gathers are errors."""
    expected = plainly(name, size, ATTENTIONS[size], STEPS)
    for mine in on_ranks(way, name, size, ATTENTIONS[size]):
        compare(mine, expected)


@cache
def on_one_rank(name: str, attention: str) -> Outcome:
    return on_ranks("one rank", name, "uneven", attention, 0.1)[0]


@pytest.mark.parametrize(("way", "name"), drawn(CASES))
def test_with_dropout_as_on_one_rank(way: str, name: str) -> None:
    """The same masks, whatever the layouts."""
    attention = "eager" if way == "tp" else "sdpa"
    for mine in on_ranks(way, name, "uneven", attention, 0.1):
        compare(mine, on_one_rank(name, attention))
