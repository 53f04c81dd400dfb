"""Halos over gloo: the same fields that the simulated ranks run."""

from __future__ import annotations

from typing import Any

from tests.cases.halos import FIELDS, WAYS, judge, on_rank
from tests.gloo import GlooWorld

NAMES = ("plain", "strided", "far", "groups", "max_places", "mean_ceil")
ON_FOUR = ("rows", "empty", "grid", "nested")


def run_fields(mesh: Any, ways: list[str]) -> list[list[Any]]:
    """What one gloo rank makes of the fields in these ways."""
    fields = {field.name: field for field in FIELDS}
    return [on_rank(mesh, fields[name], way) for way in ways for name in NAMES]


def test_fields_over_gloo(gloo: GlooWorld) -> None:
    """Values and gradients of both orders, large halos and shards of nothing."""
    fields = {field.name: field for field in FIELDS}
    for axes in ({"x": 4}, {"x": 2, "y": 2}):
        ways = [way for way in ON_FOUR if WAYS[way][0] == axes]
        of_ranks = gloo.run(run_fields, axes, ways)
        pairs = [(way, name) for way in ways for name in NAMES]
        for place, (way, name) in enumerate(pairs):
            judge(fields[name], way, [mine[place] for mine in of_ranks])
